"""Numbers of things, in texts for people."""

from __future__ import annotations


def format_count(number: int, noun: str) -> str:
    """``1 chunk``, ``2 chunks``, ``12,000 tokens``; of nouns that take an s."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_duration(seconds: float) -> str:
    """``18.4 ms``, ``2.31 s``: three significant digits."""
    return (
        f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s" if seconds < 1e3 else f"{seconds:.0f} s"
    )
