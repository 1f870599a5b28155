"""Where a new slab goes: first fit; growing before evicting; least recently used first. Pure."""

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
    """Where a slab can go, and which packs must be evicted first."""

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
    """First within the prefaulted range, then beyond it, and only then in place of unpinned packs."""
    # Growing before evicting: it costs seconds once, while an evicted copy may have to cross the network again.
    for limit in (faulted_end, end):
        found = first_fit(used, begin, limit, num_bytes)
        if found is not None:
            return Allocation(found, ())
    leaving = sorted((taken for taken in used if not taken.pinned), key=lambda taken: taken.last_used)
    for count in range(1, len(leaving) + 1):
        gone = {taken.pack_id for taken in leaving[:count]}
        found = first_fit((taken for taken in used if taken.pack_id not in gone), begin, end, num_bytes)
        if found is not None:
            # Packs that are not in the way may stay.
            overlapping = (t for t in leaving[:count] if t.begin < found + num_bytes and found < t.end)
            return Allocation(found, tuple(taken.pack_id for taken in overlapping))
    return None
