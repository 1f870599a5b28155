"""Choice of a store for a new copy: a store with free space that does not receive too many copies already."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.replication.copy_index import CopyIndex
from torchrelay.scheduler.policy.types import StoreStatus

_CACHE_SHARE = 0.8  # of an arena, which packs without recent demand may fill


class CopyPlacement:
    """The space left on each store during one decision, once it is measured; a copy counts as soon as it is placed.

    ``num_running``: copies ordered earlier.
    """

    def __init__(
        self, copy_index: CopyIndex, num_running: int, avoid: frozenset[tuple[str, str]], config: PolicyConfig
    ) -> None:
        self._copy_index, self._num_running, self._avoid, self._config = copy_index, num_running, avoid, config
        self.copies_wait = False  # there is space, but too many copies are under way
        # Bytes by store, if all copies are evicted that are neither pinned, incoming nor retained:
        self.space: dict[str, int] = {}
        self.last_space: dict[str, int] = {}  # if retained copies go too, where another copy of the pack is kept
        self.idle_space: dict[str, int] = {}  # within the cache budget, if nothing is evicted

    def measure(self, retained: Iterable[str]) -> Iterator[int]:
        """Measures the space on all stores, and yields the work of each step. ``retained``: packs whose kept copies are
        not evicted for others.
        """
        fixed: defaultdict[str, set[str]] = defaultdict(set)
        spare: defaultdict[str, set[str]] = defaultdict(set)
        for pack_id in retained:
            for rank, holder in enumerate(self._copy_index.of(pack_id).kept):
                (spare if rank and not holder.pinned else fixed)[holder.store_id].add(pack_id)
            yield 1
        for store_id, store in self._copy_index.live.items():
            self._measure(store, fixed[store_id], spare[store_id])
            yield 1 + len(store.copies) // 2

    def _measure(self, store: StoreStatus, fixed: set[str], spare: set[str]) -> None:
        num_fixed = num_spare = num_other = 0
        for copy in store.copies.values():
            if copy.num_pins or copy.receiving or copy.pack_id in fixed:
                num_fixed += copy.pack_bytes
            elif copy.pack_id in spare:
                num_spare += copy.pack_bytes
            else:
                num_other += copy.pack_bytes
        num_fixed += self._copy_index.unseen_bytes[store.store_id]
        total = store.arena_target_bytes
        self.last_space[store.store_id] = total - num_fixed
        self.space[store.store_id] = total - num_fixed - num_spare
        budget = int(total * _CACHE_SHARE)
        self.idle_space[store.store_id] = budget - num_fixed - num_spare - num_other

    def is_full(self, urgent: bool) -> bool:
        """Whether as many copies are under way as may be."""
        return self._num_running >= _limit(self._config.max_replications, urgent)

    def find(
        self, pack_id: str, space: Mapping[str, int], urgent: bool, domains: Iterable[str] = (), strictly: bool = False
    ) -> StoreStatus | None:
        """The store whose arena the copy would fill least, outside ``domains`` if possible, or only there
        (``strictly``). If no RAM has the pack, preferably a store that has it on disk.

        None if no store has space, or if all stores with space receive as many copies as they may: then copies wait.
        """
        is_full = self.is_full(urgent)
        if is_full and (self.copies_wait or not urgent):
            return None
        max_incoming = _limit(self._config.max_replications_per_store, urgent)
        copy_index, used_domains = self._copy_index, set(domains)
        num_bytes = copy_index.sizes[pack_id]
        holding = {holder.store_id for holder in copy_index.of(pack_id).holders}
        with_space = [
            store
            for store_id, store in copy_index.live.items()
            if space[store_id] >= num_bytes
            and store_id not in holding
            and (pack_id, store_id) not in self._avoid
            and not (strictly and store.domain in used_domains)
        ]
        ready = [store for store in with_space if copy_index.incoming[store.store_id] < max_incoming]
        if not ready or is_full:
            self.copies_wait |= bool(with_space)
            return None

        def cost(store: StoreStatus) -> tuple[bool, bool, float, str]:
            is_far = not holding and pack_id not in (store.disk_pack_ids or ())
            fullness = copy_index.fullness(store.store_id, num_bytes)
            return store.domain in used_domains, is_far, fullness, store.store_id

        return min(ready, key=cost)

    def take(self, pack_id: str, store_id: str) -> None:
        """Counts a copy as placed on the store."""
        num_bytes = self._copy_index.sizes[pack_id]
        for space in (self.space, self.last_space, self.idle_space):
            space[store_id] -= num_bytes
        self._copy_index.expect(pack_id, self._copy_index.live[store_id], num_bytes)
        self._num_running += 1


def _limit(limit: int, urgent: bool) -> int:
    """The limit for a copy: copies that are not urgent leave half of it free, so that no rebuild waits for them."""
    return limit if urgent else max(limit // 2, 1)
