"""Counts, sizes and durations as people read them."""

from __future__ import annotations

_NEXT_UNIT = {"B": "kB", "kB": "MB", "MB": "GB", "GB": "TB"}


def format_count(number: int, noun: str) -> str:
    """``1 chunk``, ``2 chunks``, ``12,000 tokens``; for nouns whose plural adds an s."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_bytes(num_bytes: float) -> str:
    """``1.5 GB``: three significant digits, decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}" if num_bytes < 999.5 else f"1 {_NEXT_UNIT[unit]}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"


def format_duration(seconds: float) -> str:
    """``18.4 ms``, ``2.31 s``, ``20.6 min``, ``72 h``: three significant digits."""
    for unit_s, unit in ((1e-3, "ms"), (1, "s"), (60, "min")):
        if seconds < unit_s * 999.5:
            return f"{seconds / unit_s:.3g} {unit}"
    return f"{seconds / 3600:.0f} h"
