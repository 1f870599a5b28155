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
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from torchrelay.cli.errors import CliError

T = TypeVar("T")
NARROW_CELLS = 100  # below this width tables drop optional columns
_ID = re.compile(r"\b((?:[a-z]+-)+[0-9a-z]{6})[0-9a-z]{14}\b")
_SUBSTITUTES = {"…": ".", "█": "#", "░": ".", "─": "-", "━": "-", "╸": "-", "╺": "-", "│": "|", "•": "*", "→": ">"}
LEAST_ROWS = 3  # of each table on a small screen
_LEAST_NAME_CELLS = 12
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


class Fitted:
    """Parts below each other. Where the screen has fewer lines, tables drop their last rows and count them; where it is
    small, the last tables are left out.
    """

    def __init__(self, parts: Sequence[RenderableType]) -> None:
        self._parts = parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        inner = options.update(height=None)  # otherwise each part is padded to the height of the screen
        tables = [part for part in self._parts if isinstance(part, ResultTable)]
        others = (part for part in self._parts if not isinstance(part, ResultTable))
        num_lines = options.max_height - sum(len(console.render_lines(part, inner, pad=False)) for part in others)
        while len(tables) > 1 and num_lines < sum(table.least_lines for table in tables):
            tables.pop()
        _cut(tables, num_lines - len(tables) * ResultTable.num_other_lines)
        for part in self._parts:
            if part in tables or not isinstance(part, ResultTable):
                yield from console.render(part, inner)


def _cut(tables: Sequence[ResultTable], num_rows: int) -> None:
    """Limits the rows of the tables; a line that counts rows left out takes the place of a row."""
    wanted, num_cut, num_cut_before = [len(table.lines) for table in tables], 0, -1
    while num_cut > num_cut_before:
        num_cut_before = num_cut
        shares = fair_shares(wanted, num_rows - num_cut)
        num_cut = sum(share < each for share, each in zip(shares, wanted, strict=True))
    for table, share in zip(tables, shares, strict=True):
        table.most_rows = share


def fair_shares(wanted: Sequence[int], total: int) -> list[int]:
    """Divides ``total``: the small wants are met, the others get equal shares, at least 1."""
    shares = [0] * len(wanted)
    for num_done, index in enumerate(sorted(range(len(wanted)), key=lambda index: wanted[index])):
        shares[index] = min(wanted[index], max(total // (len(wanted) - num_done), 1))
        total -= shares[index]
    return shares


def shorten_name(name: str, cells: int) -> str:
    """The name with its middle omitted if it is longer than ``cells``: its end tells variants apart."""
    half = (cells - 1) // 2
    return name if len(name) <= cells else f"{name[: cells - 1 - half]}…{name[-half:]}"


class Name:
    """A name as a cell: where its column is narrower, its middle is omitted."""

    def __init__(self, name: str) -> None:
        self._name = printable(name)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(len(self._name), _LEAST_NAME_CELLS), len(self._name))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(shorten_name(self._name, options.max_width))


class ResultTable(Table):
    """A table in the CLI's style; rows have a cell for every column, hidden ones included.

    Columns in ``right`` hold numbers; they and those in ``whole`` are not wrapped while others can shrink. With
    ``names``, only these columns shrink, and omit the middle of their names.
    ``without``: hidden columns; ``is_narrow``: less padding. ``most_rows``: more are counted, not drawn.
    """

    num_other_lines = 4  # its head, and empty lines

    def __init__(
        self,
        *columns: str,
        right: Sequence[str] = (),
        whole: Sequence[str] = (),
        names: Sequence[str] = (),
        without: Sequence[str] = (),
        title: str | None = None,
        is_narrow: bool = False,
    ) -> None:
        super().__init__(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
        if is_narrow:
            self.padding = (0, 1, 0, 0)
        self.most_rows: int | None = None
        self.lines: list[list[RenderableType]] = []
        self._is_shown = [column not in without for column in columns]
        for column in self._shown(columns):
            justify: Literal["left", "right"] = "right" if column in right else "left"
            is_whole = column not in names if names else column in right or column in whole
            self.add_column(column, justify=justify, no_wrap=is_whole)
        self._is_name = [column in names for column in self._shown(columns)]

    @property
    def least_lines(self) -> int:
        """The lines for the first rows, and for the count of the others."""
        return self.num_other_lines + min(len(self.lines), LEAST_ROWS + 1)

    def add_line(self, *cells: RenderableType) -> None:
        """A row, with a cell for every column; the first ``most_rows`` are drawn."""
        shown = zip(self._shown(cells), self._is_name, strict=True)
        self.lines.append([Name(cell) if is_name and isinstance(cell, str) else cell for cell, is_name in shown])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.lines and not self.row_count:
            for line in self.lines[: self.most_rows]:
                self.add_row(*line)
        yield from super().__rich_console__(console, options)
        if (num_left := len(self.lines) - self.row_count) > 0:
            yield Text(f"and {num_left:,} more; all: torchrelay top --once", style="dim")

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
