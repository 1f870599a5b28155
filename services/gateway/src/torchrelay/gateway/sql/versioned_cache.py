"""A bounded cache whose entries hold for one version of the table they were read from."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from cachetools import LRUCache

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class VersionedCache(Generic[K, V]):
    """An LRU cache; an entry read at another version than the requested one is a miss."""

    def __init__(self, capacity: int) -> None:
        self._entries: LRUCache[K, tuple[int, V]] = LRUCache(capacity)

    def get(self, key: K, version: int) -> V | None:
        """The entry read at ``version``, or ``None``."""
        entry = self._entries.get(key)
        return entry[1] if entry is not None and entry[0] == version else None

    def last(self, key: K) -> V | None:
        """The entry that was read last, at whatever version, or ``None``."""
        entry = self._entries.get(key)
        return None if entry is None else entry[1]

    def forget(self, key: K) -> None:
        self._entries.pop(key, None)

    def put(self, key: K, version: int, value: V) -> None:
        """``version`` must be confirmed before ``value`` is read, so that an entry is never older than its version."""
        self._entries[key] = (version, value)
