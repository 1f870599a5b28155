"""Where the CLI writes: results on standard output, so that they can be piped; everything else on standard error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchrelay.cli.problems import Problem

_PIPED_WIDTH = 200  # a pipe has no width: tables must not be cut off at 80 columns


def out() -> Console:
    """Standard output."""
    return Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)


def err() -> Console:
    """Standard error: progress, hints, figures."""
    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else _PIPED_WIDTH)


def table(*columns: str, right: Sequence[str] = (), title: str | None = None, is_narrow: bool = False) -> Table:
    """A table in the house's form; the columns in ``right`` hold numbers. ``is_narrow``: less room between columns."""
    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    if is_narrow:
        made.padding = (0, 1, 0, 0)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", no_wrap=column in right)
    return made


def print_json(value: Any) -> None:
    """For scripts: plain JSON on standard output."""
    out().print_json(data=value)


def printable(text: str) -> str:
    """Text from elsewhere without the control characters by which it could take over a terminal."""
    return "".join(character for character in text if character in "\n\t" or character.isprintable())


def sized(num_bytes: float) -> str:
    """``1.5 GB``: three significant figures, decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}" if num_bytes < 999.5 else f"1 {_NEXT[unit]}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"


_NEXT = {"B": "kB", "kB": "MB", "MB": "GB", "GB": "TB"}


def show_problem(problem: Problem) -> None:
    """One sentence, and below it what to do. Never read as markup: both may quote what others wrote."""
    where = err()
    where.print(Text.assemble(("torchrelay: ", "bold red"), printable(problem.message)))
    if problem.mend:
        where.print(Text(printable(problem.mend)), style="dim", soft_wrap=True)
