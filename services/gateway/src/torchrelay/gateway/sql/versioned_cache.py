"""A bounded cache whose entries are good for one version of the table they were read from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class VersionedCache(Generic[K, V]):
    """Least recently used out first. An entry read at another version than the one asked for is not there."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[K, tuple[int, V]] = OrderedDict()

    def get(self, key: K, version: int) -> V | None:
        """The entry read at ``version``, else ``None``."""
        entry = self._entries.get(key)
        if entry is None or entry[0] != version:
            return None
        self._entries.move_to_end(key)
        return entry[1]

    def put(self, key: K, version: int, value: V) -> None:
        """``version`` must have been confirmed before ``value`` was read: then an entry is never older than it says."""
        self._entries[key] = (version, value)
        self._entries.move_to_end(key)
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def __len__(self) -> int:
        return len(self._entries)
