"""Rows of bytes to send: what is left of them, and how much goes at once. Nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence


def nonempty_views(parts: Sequence[bytes | memoryview]) -> list[memoryview]:
    """The parts that are not empty."""
    return [memoryview(part) for part in parts if len(part)]


def take_prefix(parts: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """The first ``num_bytes`` of the parts, or all when they have fewer."""
    first: list[memoryview] = []
    for part in parts:
        if num_bytes <= 0:
            break
        first.append(part[:num_bytes])
        num_bytes -= len(first[-1])
    return first


def drop_prefix(parts: list[memoryview], num_bytes: int) -> None:
    """Takes the first ``num_bytes`` off the parts, in place."""
    while parts and num_bytes >= len(parts[0]):
        num_bytes -= len(parts.pop(0))
    if num_bytes:
        parts[0] = parts[0][num_bytes:]
