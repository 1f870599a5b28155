"""The copies of packs in the hosts' RAM: those to keep, and those to make.

A pack in demand, used within ``recent_s`` or expected to be used as soon, has ``recent_copies`` copies in different
failure domains; with fewer stores or domains than that, it has what they allow. Missing copies are ordered by worth,
copies that were lost with a host first. Further copies are not dropped, because they cost nothing until their space is
needed: a store evicts them before the kept copies (``retention.py``), of which each pack's last copy goes last.

A pack is evaluated when its copies change or it comes into demand, and in rotation, because time alone changes its
worth.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import islice
from typing import Final, TypeAlias

from torchrelay.common.recent import Recent
from torchrelay.scheduler.policy.cluster.membership import Membership
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.replication.kept_copies import KeptCopies
from torchrelay.scheduler.policy.replication.worth import UNKNOWN, PackWorth
from torchrelay.scheduler.policy.types import MAX_VERSIONS, CopyCause, Model, StoreStatus

_MAX_EVALUATED: Final = 24  # packs per call
_MAX_SEARCHES: Final = 2  # for a store, per queue and call: each looks at all stores
_ROTATION_S: Final = 4.0  # at least, between evaluations of a pack that does not change
_MAX_FAILED: Final = 4096

CopyKey: TypeAlias = tuple[str, str]  # pack, store


@dataclass(slots=True)
class Pack:
    """A remembered pack, and what its last evaluation decided."""

    model: Model
    last_used: float
    worth: PackWorth = UNKNOWN
    kept: tuple[str, ...] = ()  # stores whose copies are kept, incoming copies included; the first one evicts it last
    is_in_demand: bool = False
    is_lost: bool = False  # a copy was lost with a host, and the pack has not had all its copies since
    is_short: bool = False  # of copies that are whole


@dataclass(frozen=True)
class CopyOrder:
    """A copy of a pack to be made on a store."""

    pack: Pack
    store_id: str
    cause: CopyCause
    reason: str
    may_evict_retained: bool = False


@dataclass(slots=True)
class _Queue:
    """Packs that lack a copy. A round tries each once, so that packs for which no store is ready delay no others."""

    packs: set[str] = field(default_factory=set)
    tried: set[str] = field(default_factory=set)
    begins_again: bool = False  # after this round
    max_bytes: float = math.inf  # larger packs have no space on any store in this round

    def take(self, number: int, rank: Callable[[str], tuple[float, float, str]]) -> list[str]:
        """The first packs by ``rank`` that this round has not tried."""
        if self.begins_again and self.tried >= self.packs:
            self.tried.clear()
            self.begins_again, self.max_bytes = False, math.inf
        first = nsmallest(number, self.packs - self.tried, key=rank)
        self.tried.update(first)
        return first


class Copies:
    """All remembered packs; those that were not used for the longest time are forgotten first. Owned by the state.

    ``worth``: of a pack's copy, by its model and last use, now.
    """

    def __init__(
        self, config: PolicyConfig, membership: Membership, worth: Callable[[Model, float, float], PackWorth]
    ) -> None:
        self._config, self._membership, self._worth = config, membership, worth
        self.packs: OrderedDict[str, Pack] = OrderedDict()  # by id, in the order of their last use
        self.changed: dict[str, None] = {}  # packs to evaluate
        self.kept_copies = KeptCopies()
        self._rotation: list[str] = []  # packs that this rotation has not evaluated, the next one last
        self._rotation_at = 0.0  # when the next rotation begins
        self._lost, self._missing = _Queue(), _Queue()  # packs that lack a copy, by whether it was lost with a host
        self._failed: Recent[CopyKey, tuple[float, float]] = Recent(_MAX_FAILED)  # pause, and its end
        self._away: dict[str, tuple[StoreStatus, float]] = {}  # silent stores, and until when each may come back
        self._num_domains: int | None = None  # of all stores; None: to be counted
        self._streamed: dict[str, StoreStatus] = {}  # last report on a stream
        self._num_under_way = 0
        self._unseen: list[CopyKey] = []  # of the copies under way, those that no report shows yet

    # Events

    def use(self, model: Model, now: float) -> None:
        """Records a use of the model's pack."""
        pack_id = model.pack_id
        pack = self.packs.get(pack_id)
        if pack is None:
            pack = self.packs[pack_id] = Pack(model, now)
            if len(self.packs) > MAX_VERSIONS:
                self.forget(next(iter(self.packs)))
        self.packs.move_to_end(pack_id)
        pack.model, pack.last_used = model, now
        if not pack.is_in_demand:
            self.changed[pack_id] = None

    def forget(self, pack_id: str) -> None:
        """Forgets a pack that no longer exists, so that it is not copied anywhere until it is used again."""
        if (pack := self.packs.get(pack_id)) is not None:
            self._keep(pack, ())
            del self.packs[pack_id]
            self.changed.pop(pack_id, None)
            self._dequeue(pack_id)

    def observe(self, store: StoreStatus, before: StoreStatus | None, now: float) -> None:
        """Records a store's report; ``before``: its previous one. Packs that an earlier scheduler made it retain count
        as just used.
        """
        away, _ = self._away.pop(store.store_id, (None, 0.0))
        known = before or away
        if before is None or before.incarnation != store.incarnation:
            self.kept_copies.changed_stores[store.store_id] = None
            self._num_domains = None
        if before is None:
            for copy in store.copies.values():
                if copy.retained and copy.pack_id not in self.packs:
                    self.use(Model(copy.pack_id[:12], "", copy.pack_id, copy.pack_bytes, 0), now)
        if known is not None and known.incarnation != store.incarnation:
            self._lose(known.whole_pack_ids - store.copies.keys())
        changed = (known.whole_pack_ids if known else frozenset()) ^ store.whole_pack_ids
        if changed or before is None:
            self._change(changed)
            self._retry()

    def evicted(self, streamed: StoreStatus) -> list[str]:
        """Remembered packs that the store no longer has, and had whole in its last report on the same stream."""
        before = self._streamed.get(streamed.store_id)
        self._streamed[streamed.store_id] = streamed
        if before is None or before.incarnation != streamed.incarnation:
            return []
        return sorted((before.whole_pack_ids - streamed.copies.keys()) & self.packs.keys())

    def store_left(self, store: StoreStatus, now: float) -> None:
        """Records that the store is silent or gone; its copies count until it can no longer come back with them."""
        self._away[store.store_id] = store, now + self._config.loss_grace_s
        self._streamed.pop(store.store_id, None)
        self.kept_copies.changed_stores[store.store_id] = None
        self._change(store.whole_pack_ids)

    def copy_ended(self, key: CopyKey, now: float, error: str = "") -> None:
        """Records the end of an ordered copy. After a failure the pack is not copied to this store for a while."""
        config, (pause_s, _) = self._config, self._failed.pop(key, (0.0, now))
        if error:
            pause_s = min(max(2 * pause_s, config.copy_backoff_s), config.copy_backoff_max_s)
            self._failed[key] = pause_s, now + pause_s
        self._change((key[0],))
        self._retry()

    def _change(self, pack_ids: Iterable[str]) -> None:
        self.changed |= dict.fromkeys(sorted(self.packs.keys() & pack_ids))
        for queue in (self._lost, self._missing):
            queue.tried.difference_update(pack_ids)

    def _retry(self) -> None:
        """Another store may be ready for a copy now."""
        self._lost.begins_again = self._missing.begins_again = True

    def _dequeue(self, pack_id: str) -> None:
        self._lost.packs.discard(pack_id)
        self._missing.packs.discard(pack_id)

    def _lose(self, pack_ids: Set[str]) -> None:
        """Records copies that were lost with a host."""
        for pack_id in self.packs.keys() & pack_ids:
            self.packs[pack_id].is_lost = True
        self._change(pack_ids)

    # Evaluation

    def due(self, now: float) -> list[str]:
        """The packs to evaluate in this call: those that changed, then those whose turn has come."""
        for store_id, (store, until) in list(self._away.items()):
            if until <= now:
                del self._away[store_id]
                self._num_domains = None
                self._lose(store.whole_pack_ids)
        if not self._rotation and now >= self._rotation_at:
            self._rotation, self._rotation_at = list(self.packs), now + _ROTATION_S
            self._retry()
        due = dict.fromkeys(islice(self.changed, _MAX_EVALUATED))
        for pack_id in due:
            del self.changed[pack_id]
        while self._rotation and len(due) < _MAX_EVALUATED:
            if (pack_id := self._rotation.pop()) in self.packs:
                due[pack_id] = None
        return list(due)

    def begin(self, under_way: Sequence[CopyKey]) -> None:
        """Begins a call. ``under_way``: ordered copies that have not ended."""
        stores = self._membership.stores
        self._num_under_way, self._unseen = len(under_way), []
        for pack_id, store_id in under_way:
            if store_id in stores and ((copy := stores[store_id].copies.get(pack_id)) is None or copy.error):
                self._unseen.append((pack_id, store_id))

    def evaluate(self, pack_id: str, now: float) -> None:
        """Decides which copies of the pack are kept, and whether it lacks a copy."""
        pack, config = self.packs[pack_id], self._config
        pack.worth = self._worth(pack.model, pack.last_used, now)
        used_since = now - config.recent_s
        pack.is_in_demand = pack.last_used >= used_since or pack.worth.return_s <= config.recent_s
        self._dequeue(pack_id)
        if not pack.is_in_demand:
            pack.is_short = pack.is_lost = False
            self._keep(pack, ())
            return
        whole, incoming = self._copies_of(pack_id)
        num_wanted = min(config.recent_copies, len(self._membership.stores) + len(self._away))
        kept = self._chosen(pack, whole, [], num_wanted)
        kept.sort(key=lambda store: self._last_cost(pack, store))
        num_lacking = num_wanted - self._num_apart(kept)
        kept += self._chosen(pack, incoming, kept, num_lacking)
        self._keep(pack, tuple(store.store_id for store in kept))
        pack.is_short = num_lacking > 0
        pack.is_lost = pack.is_lost and len(whole) < num_wanted
        # A pack whose copies were all evicted is not copied: the next load reads it from afar.
        can_be_copied = pack.is_lost or any(not self._is_away(store) for store in whole + incoming)
        if can_be_copied and self._num_apart(whole + incoming) < num_wanted:
            (self._lost if pack.is_lost else self._missing).packs.add(pack_id)

    def _copies_of(self, pack_id: str) -> tuple[list[StoreStatus], list[StoreStatus]]:
        """Stores with a whole copy of the pack, and stores that it is on its way to."""
        holders = self._membership.holders(pack_id)
        whole = [store for store in holders if store.copies[pack_id].complete]
        whole += [store for store, _ in self._away.values() if pack_id in store.whole_pack_ids]
        incoming = [store for store in holders if store.copies[pack_id].receiving]
        unseen = [self._membership.stores[store_id] for each, store_id in self._unseen if each == pack_id]
        return whole, incoming + unseen

    def _num_apart(self, stores: Sequence[StoreStatus]) -> int:
        """Number of copies that do not fail together; a repeated domain counts only if no other is left."""
        if self._num_domains is None:
            all_stores = (*self._membership.stores.values(), *(store for store, _ in self._away.values()))
            self._num_domains = len({store.domain for store in all_stores})
        num_domains = len({store.domain for store in stores})
        return num_domains if num_domains < self._num_domains else len(stores)

    def _chosen(
        self, pack: Pack, copies: list[StoreStatus], beside: list[StoreStatus], number: int
    ) -> list[StoreStatus]:
        """Up to ``number`` of the copies, to be kept ``beside`` others: of present stores in different domains, then
        pinned copies, which stay anyway, then copies that were kept before, then by emptiest store.
        """
        left, chosen = list(copies), list[StoreStatus]()

        def cost(store: StoreStatus) -> tuple[bool, bool, bool, bool, float, str]:
            is_repeated = any(store.domain == other.domain for other in (*beside, *chosen))
            copy = store.copies.get(pack.model.pack_id)
            is_pinned, was_kept = copy is not None and copy.num_pins > 0, store.store_id in pack.kept
            fullness = self.kept_copies.fullness(store)
            return self._is_away(store), is_repeated, not is_pinned, not was_kept, fullness, store.store_id

        while left and len(chosen) < number:
            chosen.append(min(left, key=cost))
            left.remove(chosen[-1])
        return chosen

    def _last_cost(self, pack: Pack, store: StoreStatus) -> tuple[bool, int, bool, str]:
        """Last copies are spread over the stores, so that each store has some packs that it can give up."""
        num_bytes = self.kept_copies.last_bytes(store.store_id, without=pack.model.pack_id)
        return self._is_away(store), num_bytes, pack.kept[:1] != (store.store_id,), store.store_id

    def _is_away(self, store: StoreStatus) -> bool:
        return store.store_id in self._away

    def _keep(self, pack: Pack, store_ids: tuple[str, ...]) -> None:
        """Keeps the pack's copies on these stores, and no others."""
        if store_ids != pack.kept:
            self.kept_copies.change(pack.model.pack_id, pack.model.pack_bytes, pack.kept, store_ids)
            pack.kept = store_ids

    # New copies

    def orders(self, now: float) -> list[CopyOrder]:
        """The copies to order now, by worth: lost copies, or others if none of the lost copies can be ordered."""
        return self._orders(self._lost, now, is_urgent=True) or self._orders(self._missing, now, is_urgent=False)

    def _orders(self, queue: _Queue, now: float, *, is_urgent: bool) -> list[CopyOrder]:
        def rank(pack_id: str) -> tuple[float, float, str]:
            pack = self.packs[pack_id]
            return -pack.worth.in_ram, -pack.last_used, pack_id

        orders = list[CopyOrder]()
        max_orders = _limit(self._config.max_replications, is_urgent) - self._num_under_way
        for pack_id in queue.take(min(_MAX_SEARCHES, max_orders), rank):
            if (pack := self.packs[pack_id]).model.pack_bytes > queue.max_bytes:
                continue
            if (order := self._order(pack, now)) is not None:
                orders.append(order)
                self._num_under_way += 1
                self._unseen.append((pack_id, order.store_id))
                self.evaluate(pack_id, now)
                queue.tried.discard(pack_id)
            elif queue.max_bytes == math.inf:
                stores = self._membership.stores.values()
                spaces = (self.kept_copies.space(store, may_evict_spare=is_urgent) for store in stores)
                queue.max_bytes = max(spaces, default=0)
        return orders

    def _order(self, pack: Pack, now: float) -> CopyOrder | None:
        """The order for the pack's next copy, if a store is ready for it. A pack without any copy may displace retained
        copies that are not the last of their packs.
        """
        whole, incoming = self._copies_of(pack.model.pack_id)
        holders = whole + incoming
        store, is_any_busy = self._place(pack, holders, now)
        evicts = store is None and not is_any_busy and not holders
        if evicts:
            store, _ = self._place(pack, holders, now, may_evict_spare=True)
        if store is None:
            return None
        places = ", ".join(sorted(holder.store_id for holder in holders))
        if not holders:
            reason = "its last copy was lost with a host"
        elif pack.is_lost:
            reason = f"a copy was lost; it is left on {places}"
        elif len(holders) < self._config.recent_copies:
            reason = f"in demand, and only on {places}"
        else:
            reason = f"in demand, and {places} may fail together"
        cause = CopyCause.REBUILD if pack.is_lost else CopyCause.REPLICATE
        return CopyOrder(pack, store.store_id, cause, reason, evicts)

    def _place(
        self, pack: Pack, holders: list[StoreStatus], now: float, *, may_evict_spare: bool = False
    ) -> tuple[StoreStatus | None, bool]:
        """The store with space for a copy that kept copies fill least, outside the domains of the other copies if
        possible, or only there, if there are as many copies as wanted; if no RAM has the pack, preferably a store that
        has it on disk. Also returns whether a store with space is passed over because it receives as many copies as it
        may.
        """
        model, domains = pack.model, {holder.domain for holder in holders}
        holding, is_enough = {holder.store_id for holder in holders}, len(holders) >= self._config.recent_copies
        max_incoming = _limit(self._config.max_replications_per_store, pack.is_lost)

        def cost(store: StoreStatus) -> tuple[bool, bool, float, str]:
            is_far = not holding and model.pack_id not in (store.disk_pack_ids or ())
            return store.domain in domains, is_far, self.kept_copies.fullness(store, model.pack_bytes), store.store_id

        def is_allowed(store: StoreStatus) -> bool:
            if store.store_id in holding or (is_enough and store.domain in domains):
                return False
            _, not_before = self._failed.get((model.pack_id, store.store_id), (0.0, now))
            return not_before <= now

        is_any_busy = False
        for store in sorted(filter(is_allowed, self._membership.stores.values()), key=cost):
            if is_any_busy and store.domain in domains:
                break  # the copy waits for a store that does not fail together with the others
            if self.kept_copies.space(store, may_evict_spare=may_evict_spare) >= model.pack_bytes:
                num_unseen = sum(store_id == store.store_id for _, store_id in self._unseen)
                if store.num_receiving + num_unseen < max_incoming:
                    return store, is_any_busy
                is_any_busy = True
        return None, is_any_busy

    # Figures

    @property
    def num_short(self) -> int:
        """Packs in demand that lack whole copies."""
        return sum(pack.is_short for pack in list(self.packs.values()))

    def check_integrity(self) -> None:
        """Checks the indexes against all packs. For tests."""
        self.kept_copies.check_integrity((key, pack.model.pack_bytes, pack.kept) for key, pack in self.packs.items())
        assert self.changed.keys() | self._lost.packs | self._missing.packs <= self.packs.keys()


def evaluate_packs(
    copies: Copies, pack_ids: Sequence[str], under_way: Sequence[CopyKey], now: float
) -> Sequence[CopyOrder]:
    """Evaluates the packs, and returns the copies to order, the most pressing first. ``under_way``: ordered copies that
    have not ended. Nothing is ordered while changed packs wait for their evaluation, which may be worth more.
    """
    copies.begin(under_way)
    for pack_id in pack_ids:
        copies.evaluate(pack_id, now)
    return () if copies.changed else copies.orders(now)


def _limit(limit: int, urgent: bool) -> int:
    """The limit for a copy: copies that are not urgent leave half of it free, so that no rebuild waits for them."""
    return limit if urgent else max(limit // 2, 1)
