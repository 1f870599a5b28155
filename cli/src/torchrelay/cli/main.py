"""`torchrelay`: one program for operators and tenants."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from torchrelay.cli.problems import Problem
from torchrelay.cli.up.command import up

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Serve many models; hold accelerators only while they are called.",
)
app.command()(up)


@app.callback()
def root() -> None:
    """Serve many models; hold accelerators only while they are called."""


def main() -> None:
    """Entry point: prints a ``Problem`` as a sentence with its mend instead of a traceback."""
    try:
        app()
    except Problem as problem:
        console = Console(stderr=True, highlight=False)
        console.print(f"[bold red]torchrelay:[/bold red] {problem.message}")
        if problem.mend:
            console.print(f"  {problem.mend}")
        sys.exit(1)
