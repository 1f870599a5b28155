"""Numbers of things, in texts for people."""

from __future__ import annotations


def format_count(number: int, noun: str) -> str:
    """``1 chunk``, ``2 chunks``, ``12,000 tokens``; of nouns that take an s."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
