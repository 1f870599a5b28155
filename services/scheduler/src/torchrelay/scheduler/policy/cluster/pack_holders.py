"""Which stores have which pack, in RAM or on disk: by pack, so that nobody looks at all stores."""

from __future__ import annotations

from collections.abc import Set
from itertools import count


class PackHolders:
    """Stores in the order in which they came."""

    def __init__(self) -> None:
        self._of: dict[str, set[str]] = {}
        self._numbers: dict[str, int] = {}
        self._next_number = count()

    def change(self, store_id: str, before: Set[str], now: Set[str]) -> None:
        """The store had the packs ``before``, and has those of ``now``."""
        if store_id not in self._numbers:
            self._numbers[store_id] = next(self._next_number)
        for pack_id in now - before:
            self._of.setdefault(pack_id, set()).add(store_id)
        for pack_id in before - now:
            holders = self._of[pack_id]
            holders.remove(store_id)
            if not holders:
                del self._of[pack_id]

    def drop(self, store_id: str, before: Set[str]) -> None:
        """The store is gone."""
        self.change(store_id, before, frozenset())
        del self._numbers[store_id]

    def any_of(self, pack_id: str) -> Set[str]:
        """In no order."""
        return self._of.get(pack_id, frozenset())

    def of(self, pack_id: str) -> list[str]:
        return sorted(self.any_of(pack_id), key=self._numbers.__getitem__)
