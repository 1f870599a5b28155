"""The timeline of a request and the decisions about it, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Group
from rich.text import Text

from torchrelay.cli.views.console import NARROW_CELLS, ResultTable, WidthAware, shorten_ids

BAR_CELLS = 40
COLUMNS_CELLS = 80  # width of the other columns
Phase = Mapping[str, Any]
Decision = Mapping[str, Any]


def explanation(
    phases: Sequence[Phase], decisions: Sequence[Decision], worth: Sequence[Mapping[str, str]] = ()
) -> WidthAware:
    """The timeline, with bars on a wide terminal, then the decisions, and what a slot is worth to the model now."""

    def draw(width: int) -> Group:
        bar_cells = min(BAR_CELLS, width - COLUMNS_CELLS) if width >= NARROW_CELLS else 0
        parts = [timeline(phases, bar_cells)] if phases else []
        parts += [decisions_table(decisions)] if decisions else []
        return Group(*parts, *([worth_table(worth)] if worth else []))

    return WidthAware(draw)


def decisions_table(decisions: Sequence[Decision]) -> ResultTable:
    """The decisions: time, kind, subject and reason."""
    table = ResultTable("at", "decision", "subject", "reason", whole=("at", "decision", "subject"), is_narrow=True)
    for decision in decisions:
        at = datetime.fromtimestamp(decision["at_unix_us"] / 1e6).strftime("%H:%M:%S.%f")[:-3]
        table.add_line(
            at, decision["kind"], Text(shorten_ids(decision["subject"])), Text(shorten_ids(decision["reason"]))
        )
    return table


def worth_table(worth: Sequence[Mapping[str, str]]) -> ResultTable:
    """The bottleneck of a model's instances, its present bid and ask, and why it waits."""
    table = ResultTable("now", "", whole=("now",), is_narrow=True)
    for line in worth:
        table.add_line(line["label"], Text(shorten_ids(line["text"])))
    return table


def timeline(phases: Sequence[Phase], bar_cells: int = BAR_CELLS) -> ResultTable:
    """Start and duration of each phase in ms, and a bar of ``bar_cells`` (0: none)."""
    origin = min(phase["begin_unix_us"] for phase in phases)
    span_us = max(max(phase["end_unix_us"], phase["begin_unix_us"]) for phase in phases) - origin
    table = ResultTable(
        *("phase", "start", "duration", "", "where", "detail"),
        right=("start", "duration"),
        whole=("phase", "", "where"),
        without=() if bar_cells else ("",),
        is_narrow=True,
    )
    for phase in phases:
        begin_us, is_open = phase["begin_unix_us"] - origin, phase["end_unix_us"] < phase["begin_unix_us"]
        took_us = max(phase["end_unix_us"] - phase["begin_unix_us"], 0)
        table.add_line(
            phase["name"],
            f"{begin_us / 1000:,.1f} ms",
            "running" if is_open else f"{took_us / 1000:,.1f} ms",
            bar(begin_us, span_us - begin_us if is_open else took_us, span_us, bar_cells or BAR_CELLS),
            Text(shorten_ids(phase["where"])),
            Text(shorten_ids(phase["detail"]), style="dim"),
        )
    return table


def bar(begin_us: int, took_us: int, span_us: int, cells: int = BAR_CELLS) -> Text:
    """A bar of at least one cell, placed to scale within ``cells``."""
    scale = cells / span_us if span_us else 0.0
    first = min(int(begin_us * scale), cells - 1)
    length = max(1, min(round((begin_us + took_us) * scale), cells) - first)
    return Text.assemble(" " * first, ("█" * length, "cyan"), " " * (cells - first - length))
