"""CSV that spreadsheets open without running any of its texts. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import TypeAlias

Cell: TypeAlias = str | int | Decimal | None
_BEGINS_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_bytes(rows: Iterable[Sequence[Cell]]) -> bytes:
    """The lines of ``rows``; None is empty. A text that a spreadsheet would take for a formula begins with an
    apostrophe.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_cell(cell) for cell in row] for row in rows)
    return text.getvalue().encode()


def _cell(cell: Cell) -> str:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_BEGINS_FORMULA) else cell_text(cell)


def cell_text(cell: Cell) -> str:
    """The cell as people read it; numbers have all their digits, and no exponent."""
    if isinstance(cell, str):
        return cell
    return "" if cell is None else format(cell, "f" if isinstance(cell, Decimal) else "d")
