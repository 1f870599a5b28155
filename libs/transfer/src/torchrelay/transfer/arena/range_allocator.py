"""Finds the range of a new slab: first fit, growth before eviction, least recently used first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UsedRange:
    """The range [begin, end) of the arena that one pack occupies."""

    pack_id: str
    begin: int
    end: int
    last_used: int
    pinned: bool


@dataclass(frozen=True, slots=True)
class Allocation:
    """The offset of a new slab, and the packs to evict before it is placed."""

    begin: int
    evicted: tuple[str, ...]


def first_fit(used: Iterable[UsedRange], begin: int, end: int, num_bytes: int) -> int | None:
    """The lowest offset in [begin, end) with ``num_bytes`` free, or None."""
    for taken in sorted(used, key=lambda taken: taken.begin):
        if taken.begin - begin >= num_bytes:
            break
        begin = max(begin, taken.end)
    return begin if begin + num_bytes <= end else None


def find_space(used: Sequence[UsedRange], begin: int, faulted_end: int, end: int, num_bytes: int) -> Allocation | None:
    """Searches the prefaulted range, then the range beyond it, and only then evicts unpinned packs."""
    # Growth costs seconds once, while an evicted copy may have to cross the network again.
    for limit in (faulted_end, end):
        offset = first_fit(used, begin, limit, num_bytes)
        if offset is not None:
            return Allocation(offset, ())
    evictable = sorted((taken for taken in used if not taken.pinned), key=lambda taken: taken.last_used)
    for count in range(1, len(evictable) + 1):
        candidates = {taken.pack_id for taken in evictable[:count]}
        offset = first_fit((taken for taken in used if taken.pack_id not in candidates), begin, end, num_bytes)
        if offset is not None:
            overlapping = (t for t in evictable[:count] if t.begin < offset + num_bytes and offset < t.end)
            return Allocation(offset, tuple(taken.pack_id for taken in overlapping))
    return None
