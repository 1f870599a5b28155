"""Index of the copies of packs, and the choice of those to keep."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torchrelay.scheduler.policy.types import StoreStatus


class CopyLocation(NamedTuple):
    """A store with a copy of a pack, whole or incoming."""

    store_id: str
    domain: str
    pinned: bool = False
    away: bool = False  # silent for the moment, and may come back


@dataclass
class CopySet:
    """The copies of one pack."""

    whole: list[CopyLocation] = field(default_factory=list)
    incoming_copies: list[CopyLocation] = field(default_factory=list)
    num_wanted: int = 0  # at most one per store
    kept: tuple[CopyLocation, ...] = ()  # some of ``whole``; the first is the last to be evicted

    @property
    def holders(self) -> list[CopyLocation]:
        return self.whole + self.incoming_copies

    @property
    def is_settled(self) -> bool:
        return 0 < self.num_wanted <= len(self.kept)

    @property
    def num_missing(self) -> int:
        return max(self.num_wanted - len(self.kept) - len(self.incoming_copies), 0)

    @property
    def domains(self) -> set[str]:
        return {holder.domain for holder in self.holders}


class CopyIndex:
    """All copies in ``stores`` (by id), including stores that are ``away``, once each was added.

    ``sizes``: bytes of the packs to decide on.
    """

    def __init__(self, stores: Mapping[str, StoreStatus], away: frozenset[str], sizes: Mapping[str, int]) -> None:
        self.stores, self.sizes = stores, sizes
        self.live = {store_id: store for store_id, store in stores.items() if store_id not in away}
        self.num_domains = len({store.domain for store in self.live.values()})
        self.incoming: Counter[str] = Counter()  # number of incoming copies, by store
        self.unseen_bytes: Counter[str] = Counter()  # ordered copies that no report shows yet, by store
        self.kept_bytes: Counter[str] = Counter()  # by store, incoming copies included
        self._of: defaultdict[str, CopySet] = defaultdict(CopySet)

    def add(self, store: StoreStatus) -> None:
        """Adds the copies that the store reports."""
        is_away = store.store_id not in self.live
        for copy in store.copies.values():
            holder = CopyLocation(store.store_id, store.domain, copy.num_pins > 0, is_away)
            if copy.complete:
                self._of[copy.pack_id].whole.append(holder)
            elif copy.receiving and not is_away:
                self.expect(copy.pack_id, store, copy.pack_bytes, holder.pinned)

    def expect_ordered(self, under_way: Iterable[tuple[str, str]]) -> None:
        """Adds ordered copies that no report shows yet. ``under_way``: pack and store, oldest first."""
        for pack_id, store_id in under_way:
            target = self.live.get(store_id)
            if target is None or pack_id not in self.sizes:
                continue
            reported = target.copies.get(pack_id)
            if reported is None or reported.error:
                self.expect(pack_id, target, self.sizes[pack_id])
                self.unseen_bytes[store_id] += self.sizes[pack_id]

    def expect(self, pack_id: str, store: StoreStatus, num_bytes: int, pinned: bool = False) -> None:
        """Counts a copy that will arrive at the store."""
        self._of[pack_id].incoming_copies.append(CopyLocation(store.store_id, store.domain, pinned))
        self.incoming[store.store_id] += 1
        self.kept_bytes[store.store_id] += num_bytes

    def of(self, pack_id: str) -> CopySet:
        return self._of[pack_id]

    def choose(self, goals: Mapping[str, int]) -> Iterator[int]:
        """Chooses the copies to keep, up to the goal of each pack: first packs without a choice, then by size. Yields
        the work of each step.
        """
        last_bytes: Counter[str] = Counter()
        for pack_id, goal in goals.items():
            self._of[pack_id].num_wanted = min(goal, len(self.stores))
        has_choice = {pack_id: len(self._of[pack_id].whole) > self._of[pack_id].num_wanted for pack_id in goals}
        in_order = sorted(goals, key=lambda pack_id: (has_choice[pack_id], -self.sizes[pack_id], pack_id))
        yield len(in_order) // 2
        for pack_id in in_order:
            yield 2
            copies = self._of[pack_id]
            # Last copies are spread over the stores, so that every store has some packs it can give up.
            kept = sorted(self._keepers(copies), key=lambda holder: (holder.away, last_bytes[holder.store_id]))
            copies.kept = tuple(kept)
            if kept:
                last_bytes[kept[0].store_id] += self.sizes[pack_id]
            for holder in copies.kept:
                self.kept_bytes[holder.store_id] += self.sizes[pack_id]

    def _keepers(self, copies: CopySet) -> list[CopyLocation]:
        """The copies to keep: of live stores in different domains, then pinned copies, which stay anyway, then by
        emptiest store.
        """
        if len(copies.whole) <= copies.num_wanted:
            return copies.whole
        left, kept = list(copies.whole), list[CopyLocation]()

        def cost(holder: CopyLocation) -> tuple[bool, bool, bool, float, str]:
            is_repeated = any(holder.domain == other.domain for other in kept)
            return holder.away, is_repeated, not holder.pinned, self.fullness(holder.store_id), holder.store_id

        while left and len(kept) < copies.num_wanted:
            kept.append(min(left, key=cost))
            left.remove(kept[-1])
        return kept

    def fullness(self, store_id: str, more_bytes: int = 0) -> float:
        """Share of the arena that kept and incoming copies and ``more_bytes`` take."""
        return (self.kept_bytes[store_id] + more_bytes) / max(self.stores[store_id].arena_target_bytes, 1)
