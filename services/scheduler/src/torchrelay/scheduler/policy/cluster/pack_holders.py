"""Index of the stores that have each pack, in RAM or on disk."""

from __future__ import annotations

from collections.abc import Set
from itertools import count


class PackHolders:
    """Store ids by pack, in order of the stores' arrival."""

    def __init__(self) -> None:
        self._of: dict[str, set[str]] = {}
        self._numbers: dict[str, int] = {}
        self._next_number = count()

    def change(self, store_id: str, before: Set[str], now: Set[str]) -> None:
        """Updates the index for a store that had the packs ``before`` and has the packs ``now``."""
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
        """Removes a store that is gone."""
        self.change(store_id, before, frozenset())
        del self._numbers[store_id]

    def any_of(self, pack_id: str) -> Set[str]:
        """Stores that have the pack, in no order."""
        return self._of.get(pack_id, frozenset())

    def of(self, pack_id: str) -> list[str]:
        return sorted(self.any_of(pack_id), key=self._numbers.__getitem__)
