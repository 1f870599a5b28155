"""Bytes as people read them."""

from __future__ import annotations

_NEXT = {"B": "kB", "kB": "MB", "MB": "GB", "GB": "TB"}


def format_bytes(num_bytes: float) -> str:
    """``1.5 GB``: three significant figures, decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}" if num_bytes < 999.5 else f"1 {_NEXT[unit]}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"
