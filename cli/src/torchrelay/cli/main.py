"""`torchrelay`: one program for operators and tenants."""

from __future__ import annotations

import sys

import typer

from torchrelay.cli import console
from torchrelay.cli.commands import chat, explain, key, models, tenant, top, upload, usage
from torchrelay.cli.problems import Problem
from torchrelay.cli.up.command import EXAMPLE as UP_EXAMPLE
from torchrelay.cli.up.command import up

SUMMARY = "Serve many models; hold accelerators only while they are called."
EPILOG = """First steps: leave `torchrelay up` running, and in a second terminal:

1. torchrelay key create --tenant acme

2. torchrelay upload DIR --name mine

3. torchrelay chat mine "Hello"
"""
PLATFORM, USE, MONEY = "The platform", "Models", "Tenants and money"

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help=SUMMARY,
    epilog=EPILOG,
)
app.command(rich_help_panel=PLATFORM, epilog=UP_EXAMPLE)(up)
app.command(rich_help_panel=PLATFORM, epilog=top.EXAMPLE)(top.top)
app.command(rich_help_panel=PLATFORM, epilog=explain.EXAMPLE)(explain.explain)
app.command(rich_help_panel=USE, epilog=upload.EXAMPLE)(upload.upload)
app.command(rich_help_panel=USE, epilog=models.EXAMPLE)(models.models)
app.command(rich_help_panel=USE, epilog=chat.EXAMPLE)(chat.chat)
app.add_typer(key.app, name="key", rich_help_panel=MONEY)
app.add_typer(tenant.app, name="tenant", rich_help_panel=MONEY)
app.command(rich_help_panel=MONEY, epilog=usage.USAGE_EXAMPLE)(usage.usage)
app.command(rich_help_panel=MONEY, epilog=usage.BILL_EXAMPLE)(usage.bill)


def main() -> None:
    """Entry point: prints a ``Problem`` as a sentence with its mend instead of a traceback."""
    try:
        app()
    except Problem as problem:
        console.show_problem(problem)
        sys.exit(1)
