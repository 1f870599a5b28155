"""The eviction order of a cache of bytes. Pure.

The least recently used entries of the tenant that needs space go first, then the least recently used of all. So a
tenant with many models empties its own part of a cache, and other parts only until its own is large enough.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")


@dataclass(slots=True)
class _Entry:
    num_bytes: int
    owner: str | None  # None: several tenants use it


class TenantLru(Generic[K]):
    """The bookkeeping of a cache of ``max_bytes``; the values are elsewhere."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[K, _Entry] = OrderedDict()
        self.num_bytes = 0

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: K, tenant: str, num_bytes: int) -> None:
        self._entries[key] = _Entry(num_bytes, tenant)
        self.num_bytes += num_bytes

    def use(self, key: K, tenant: str) -> None:
        """Notes that ``tenant`` uses an entry."""
        entry = self._entries[key]
        if entry.owner != tenant:
            entry.owner = None
        self._entries.move_to_end(key)

    def can_fit(self, num_bytes: int, kept: Collection[K]) -> bool:
        """Whether ``num_bytes`` fit beside the entries in ``kept``."""
        held = sum(entry.num_bytes for key, entry in self._entries.items() if key in kept)
        return held + num_bytes <= self._max_bytes

    def evict_for(self, num_bytes: int, tenant: str, kept: Collection[K] = ()) -> list[K]:
        """Removes and returns the entries that must go so that ``num_bytes`` fit, if they can; ``kept`` stays."""
        gone: list[K] = []
        own = [key for key, entry in self._entries.items() if entry.owner == tenant]
        for key in (*own, *self._entries):
            if self.num_bytes + num_bytes <= self._max_bytes:
                break
            if key not in kept and key not in gone:
                self.num_bytes -= self._entries[key].num_bytes
                gone.append(key)
        for key in gone:
            del self._entries[key]
        return gone
