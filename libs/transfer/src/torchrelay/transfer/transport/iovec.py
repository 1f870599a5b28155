"""Sequences of buffers to send, split without copying."""

from __future__ import annotations

from collections.abc import Sequence


def nonempty_views(parts: Sequence[bytes | memoryview]) -> list[memoryview]:
    """The non-empty parts."""
    return [memoryview(part) for part in parts if len(part)]


def take_prefix(parts: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """The first ``num_bytes`` of the parts, or all parts if they have fewer bytes."""
    first: list[memoryview] = []
    for part in parts:
        if num_bytes <= 0:
            break
        first.append(part[:num_bytes])
        num_bytes -= len(first[-1])
    return first


def drop_prefix(parts: list[memoryview], num_bytes: int) -> None:
    """Removes the first ``num_bytes`` of the parts, in place."""
    while parts and num_bytes >= len(parts[0]):
        num_bytes -= len(parts.pop(0))
    if num_bytes:
        parts[0] = parts[0][num_bytes:]
