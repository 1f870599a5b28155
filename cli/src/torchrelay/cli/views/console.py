"""Output: results on standard output, so that they can be piped; everything else on standard error."""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from io import TextIOWrapper
from typing import Any, Literal, TypeVar

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from torchrelay.cli.errors import CliError

T = TypeVar("T")
NARROW_CELLS = 100  # below this width tables drop optional columns
_ID = re.compile(r"\b((?:[a-z]+-)+[0-9a-z]{6})[0-9a-z]{14}\b")
_SUBSTITUTES = {"…": ".", "█": "#", "░": ".", "─": "-", "━": "-", "╸": "-", "╺": "-", "│": "|", "•": "*", "→": ">"}
_PIPED_WIDTH = 200  # a pipe has no width: tables must not be cut off at 80 columns


def write_any_text() -> None:
    """Makes standard output and standard error write a plain substitute for what their encoding lacks."""
    codecs.register_error("plain", _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="plain")


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_SUBSTITUTES.get(character, "?") for character in text), error.end


def out() -> Console:
    """Standard output."""
    return Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)


def err() -> Console:
    """Standard error: progress, hints, figures."""
    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else _PIPED_WIDTH)


class WidthAware:
    """A renderable that draws itself again for the current width of the terminal."""

    def __init__(self, draw: Callable[[int], RenderableType]) -> None:
        self._draw = draw

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._draw(options.max_width)


class ResultTable(Table):
    """A table in the CLI's style; rows have a cell for every column, hidden ones included.

    Columns in ``right`` hold numbers; they and those in ``whole`` are not wrapped while others can shrink.
    ``without``: hidden columns; ``is_narrow``: less padding.
    """

    def __init__(
        self,
        *columns: str,
        right: Sequence[str] = (),
        whole: Sequence[str] = (),
        without: Sequence[str] = (),
        title: str | None = None,
        is_narrow: bool = False,
    ) -> None:
        super().__init__(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
        if is_narrow:
            self.padding = (0, 1, 0, 0)
        self._is_shown = [column not in without for column in columns]
        for column in self._shown(columns):
            justify: Literal["left", "right"] = "right" if column in right else "left"
            self.add_column(column, justify=justify, no_wrap=column in right or column in whole)

    def add_line(self, *cells: RenderableType) -> None:
        """A row, with a cell for every column."""
        self.add_row(*self._shown(cells))

    def _shown(self, cells: Iterable[T]) -> list[T]:
        return [cell for cell, is_shown in zip(cells, self._is_shown, strict=True) if is_shown]


def print_json(value: Any) -> None:
    """JSON on standard output, for scripts."""
    out().print_json(data=value)


def printable(text: str) -> str:
    """Untrusted text without control characters, which could take over the terminal."""
    return "".join(character for character in text if character in "\n\t" or character.isprintable())


def shorten_ids(text: str) -> str:
    """Shortens ids of twenty random letters to the first six, as in ``inst-njqw24``."""
    return _ID.sub(r"\1", text)


def print_error(error: CliError) -> None:
    """The message and below it the hint. Never as markup: both may quote untrusted text."""
    where = err()
    where.print(Text.assemble(("torchrelay: ", "bold red"), printable(error.message)))
    if error.hint:
        where.print(Text(printable(error.hint)), style="dim", soft_wrap=True)
