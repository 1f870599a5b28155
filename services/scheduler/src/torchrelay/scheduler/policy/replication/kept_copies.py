"""The kept copies by store, and the space that they leave: indexes of each pack's ``kept``."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable

from torchrelay.scheduler.policy.types import StoreStatus


class KeptCopies:
    """Packs and bytes by store, copies on their way included. A pack's first store evicts its copy last."""

    def __init__(self) -> None:
        self.changed_stores: dict[str, None] = {}  # that are to be told what they keep
        self._packs: defaultdict[str, dict[str, int]] = defaultdict(dict)  # bytes by pack
        self._last_packs: defaultdict[str, set[str]] = defaultdict(set)
        self._num_bytes: Counter[str] = Counter()
        self._num_last_bytes: Counter[str] = Counter()

    def change(self, pack_id: str, num_bytes: int, before: tuple[str, ...], after: tuple[str, ...]) -> None:
        """Keeps the pack's copies on the stores ``after``, and no longer on those ``before``."""
        for store_id in before:
            num_bytes_before = self._packs[store_id].pop(pack_id)
            self._num_bytes[store_id] -= num_bytes_before
            if pack_id in self._last_packs[store_id]:
                self._last_packs[store_id].remove(pack_id)
                self._num_last_bytes[store_id] -= num_bytes_before
        for store_id in after:
            self._packs[store_id][pack_id] = num_bytes
            self._num_bytes[store_id] += num_bytes
        for store_id in after[:1]:
            self._last_packs[store_id].add(pack_id)
            self._num_last_bytes[store_id] += num_bytes
        is_last_elsewhere = after[:1] != before[:1]
        changed = {*set(before) ^ set(after), *(after[:1] if is_last_elsewhere else ())}
        self.changed_stores |= dict.fromkeys(sorted(changed))

    def on(self, store_id: str) -> Collection[str]:
        """The packs that the store keeps."""
        return self._packs[store_id].keys()

    def last_bytes(self, store_id: str, without: str) -> int:
        """Bytes of the last kept copies of packs on the store, ``without`` a pack."""
        is_last = without in self._last_packs[store_id]
        return self._num_last_bytes[store_id] - (self._packs[store_id][without] if is_last else 0)

    def fullness(self, store: StoreStatus, more_bytes: int = 0) -> float:
        """Share of the arena that kept copies and ``more_bytes`` take."""
        return (self._num_bytes[store.store_id] + more_bytes) / max(store.arena_target_bytes, 1)

    def space(self, store: StoreStatus, *, may_evict_spare: bool) -> int:
        """Bytes that are free once all copies are evicted that are neither pinned, arriving nor kept;
        ``may_evict_spare``: nor the last kept copy of their pack.
        """
        of_store = store.store_id
        kept = self._last_packs[of_store] if may_evict_spare else self._packs[of_store].keys()
        num_kept = (self._num_last_bytes if may_evict_spare else self._num_bytes)[of_store]
        num_fixed = sum(num_bytes for pack_id, num_bytes in store.fixed_bytes.items() if pack_id not in kept)
        return store.arena_target_bytes - num_kept - num_fixed

    def check_integrity(self, kept: Iterable[tuple[str, int, tuple[str, ...]]]) -> None:
        """Checks the indexes against ``kept``: pack, its bytes and its stores. For tests."""
        expected = KeptCopies()
        for pack_id, num_bytes, store_ids in kept:
            expected.change(pack_id, num_bytes, (), store_ids)
        for name in ("_packs", "_last_packs", "_num_bytes", "_num_last_bytes"):
            mine, theirs = getattr(self, name), getattr(expected, name)
            assert {key: value for key, value in mine.items() if value} == dict(theirs), name
