"""Writes the tables and plots of bench/simulate.py to a folder."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ParamSpec

from bench.report import progress
from torchrelay.cli.errors import CliError

P = ParamSpec("P")


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1))


def write_table(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Writes a CSV file; all rows have the columns of the first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def draw(plot: Callable[P, None], *arguments: P.args, **options: P.kwargs) -> None:
    """Draws the plot, or prints why it cannot."""
    try:
        plot(*arguments, **options)
    except CliError as error:
        progress(f"no plot: {error}")
