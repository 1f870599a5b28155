"""`torchrelay`: one program for operators and tenants."""

from __future__ import annotations

import os
import signal
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

try:
    import typer

    from torchrelay.cli.advise.command import EXAMPLE as ADVISE_EXAMPLE
    from torchrelay.cli.advise.command import advise
    from torchrelay.cli.bench.command import EXAMPLE as BENCH_EXAMPLE
    from torchrelay.cli.bench.command import bench
    from torchrelay.cli.command_group import CommandGroup
    from torchrelay.cli.commands import (
        audit,
        batch,
        chat,
        demo,
        events,
        explain,
        key,
        models,
        operator,
        prices,
        sim,
        tenant,
        top,
        upload,
        uploads,
        usage,
        webhook,
    )
    from torchrelay.cli.errors import CliError
    from torchrelay.cli.join.command import EXAMPLE as JOIN_EXAMPLE
    from torchrelay.cli.join.command import join
    from torchrelay.cli.size.command import EXAMPLE as SIZE_EXAMPLE
    from torchrelay.cli.size.command import size
    from torchrelay.cli.up.command import EXAMPLE as UP_EXAMPLE
    from torchrelay.cli.up.command import up
    from torchrelay.cli.views import console
except KeyboardInterrupt:  # these imports take most of a second
    sys.exit(128 + signal.SIGINT)

SUMMARY = "Serve many models; hold accelerators only while they are called."
EPILOG = """First steps: leave `torchrelay up` running and, in a second terminal:

1. torchrelay key create --tenant acme

2. torchrelay upload DIR --name mine

3. torchrelay chat mine "Hello"
"""
PLATFORM, USE, MONEY = "The platform", "Models", "Tenants and money"

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help=SUMMARY,
    epilog=EPILOG,
)


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
    home: Annotated[
        Path | None, typer.Option("--home", help="Folder of the platform, for any command that uses it.", metavar="DIR")
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="Address of the gateway, for any command that calls it.", metavar="URL")
    ] = None,
) -> None:
    # As variables, so that the same options of a command take precedence.
    if home is not None:
        os.environ["TORCHRELAY_HOME"] = str(home)
    if url is not None:
        os.environ["TORCHRELAY_API_URL"] = url
    if version:
        typer.echo(f"torchrelay {metadata.version('torchrelay')}")
        raise typer.Exit


app.command(rich_help_panel=PLATFORM, epilog=UP_EXAMPLE)(up)
app.command(rich_help_panel=PLATFORM, epilog=JOIN_EXAMPLE)(join)
app.command(rich_help_panel=PLATFORM)(demo.demo)
app.command(rich_help_panel=PLATFORM, epilog=top.EXAMPLE)(top.top)
app.command(rich_help_panel=PLATFORM, epilog=events.EXAMPLE)(events.events)
app.command(rich_help_panel=PLATFORM, epilog=explain.EXAMPLE)(explain.explain)
app.command(rich_help_panel=PLATFORM, epilog=sim.EXAMPLE)(sim.sim)
app.command(rich_help_panel=PLATFORM, epilog=ADVISE_EXAMPLE)(advise)
app.add_typer(operator.app, name="operator", rich_help_panel=PLATFORM)
app.command(rich_help_panel=PLATFORM, epilog=audit.EXAMPLE)(audit.audit)
app.command(rich_help_panel=USE, epilog=upload.EXAMPLE)(upload.upload)
app.command(rich_help_panel=USE, epilog=SIZE_EXAMPLE)(size)
app.add_typer(uploads.app, name="uploads", rich_help_panel=USE, epilog=uploads.EXAMPLE)
app.add_typer(models.app, name="models", rich_help_panel=USE, epilog=models.EXAMPLE)
app.command(rich_help_panel=USE, epilog=chat.EXAMPLE)(chat.chat)
app.command(rich_help_panel=USE, epilog=BENCH_EXAMPLE)(bench)
app.add_typer(batch.app, name="batch", rich_help_panel=USE, epilog=batch.EXAMPLE)
app.add_typer(key.app, name="key", rich_help_panel=MONEY)
app.add_typer(tenant.app, name="tenant", rich_help_panel=MONEY)
app.add_typer(webhook.app, name="webhook", rich_help_panel=MONEY)
app.add_typer(prices.app, name="prices", rich_help_panel=MONEY, epilog=prices.EXAMPLE)
app.add_typer(usage.app, name="usage", rich_help_panel=MONEY, epilog=usage.USAGE_EXAMPLE)
app.add_typer(usage.bills, name="bill", rich_help_panel=MONEY, epilog=usage.BILL_EXAMPLE)


def main() -> None:
    """Entry point: prints a ``CliError`` or an unusable file as a sentence, without a traceback.

    A reader that went away (``| head``) is not reported.
    """
    console.write_any_text()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except CliError as error:
        console.print_error(error)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        _discard_output()
        sys.exit(1)
    except OSError as error:
        _discard_output()
        where = error.filename or "reading or writing failed"
        console.print_error(CliError(f"{where}: {error.strerror or error}"))
        sys.exit(1)


def _discard_output() -> None:
    """Python would retry the unwritten output at exit, and print a traceback."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
