"""What the replicator remembers between its decisions: copies it ordered, what was lost, what stores were told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace

from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.core import StoreStatus
from torchrelay.scheduler.policy.replication.recent_packs import RecentPacks
from torchrelay.scheduler.policy.replication.repair import CopyCause

_START_TIMEOUT_S = 10.0  # an order whose store never reports the pack is given up after this time
_REPORT_LAG_S = 0.5  # a report that comes later than this was made after the command was answered
_KEEP_TRIES = 5  # failed copies of a lost pack that nobody uses before it is given up: it may have been deleted
_RETAIN_RETRY_S = 2.0  # a retained_packs that names the same packs in another order is renewed at most so often

Key = tuple[str, str]  # pack, store


@dataclass(frozen=True)
class OrderedCopy:
    """A copy under way. ``begun_at``: its store has taken the order; 0: not yet."""

    cause: CopyCause
    ordered_at: float
    begun_at: float = 0.0


@dataclass(frozen=True)
class EndedCopy:
    """A copy that was under way and is no longer; without ``error`` it is whole, or its store is gone."""

    pack_id: str
    store_id: str
    cause: CopyCause
    took_s: float
    error: str = ""


@dataclass(frozen=True)
class _FailedCopy:
    times: int
    not_before: float


@dataclass(frozen=True)
class _RetentionLease:
    """The retained_packs that a store was given."""

    incarnation: str
    packs: tuple[str, ...]
    renew_at: float
    reorder_at: float


@dataclass
class ReplicationState:
    """Owned by the state."""

    recent_packs: RecentPacks = field(default_factory=RecentPacks)
    settled: frozenset[str] = frozenset()  # recent packs that have had all their copies
    lost: set[str] = field(default_factory=set)  # packs of which a copy went with a host
    due_at: float = 0.0
    num_short: int = 0  # recent packs that lack copies
    _ordered: dict[Key, OrderedCopy] = field(default_factory=dict)
    _failed: dict[Key, _FailedCopy] = field(default_factory=dict)
    _away: dict[str, tuple[StoreStatus, float]] = field(default_factory=dict)  # until when it may come back
    _told: dict[str, _RetentionLease] = field(default_factory=dict)

    # Orders

    def order(self, key: Key, cause: CopyCause, now: float) -> None:
        self._ordered[key] = OrderedCopy(cause, now)

    def begun(self, key: Key, now: float) -> None:
        """The store has taken the order."""
        if ordered := self._ordered.get(key):
            self._ordered[key] = replace(ordered, begun_at=now)

    def fail(self, key: Key, error: str, now: float, config: PolicyConfig) -> EndedCopy | None:
        """The pack is not brought there again for a while; one that nobody uses, after some tries nowhere."""
        ordered = self._ordered.pop(key, None)
        if ordered is None:
            return None
        times = self._failed[key].times + 1 if key in self._failed else 1
        pause_s = min(config.copy_backoff_s * 2 ** (times - 1), config.copy_backoff_max_s)
        self._failed[key] = _FailedCopy(times, now + pause_s)
        num_tries = sum(failed.times for (pack_id, _), failed in self._failed.items() if pack_id == key[0])
        if ordered.cause is CopyCause.KEEP and num_tries >= _KEEP_TRIES:
            self.lost.discard(key[0])
        return EndedCopy(*key, ordered.cause, now - ordered.ordered_at, error)

    def ended(self, stores: Mapping[str, StoreStatus], now: float, config: PolicyConfig) -> Iterator[EndedCopy]:
        """Takes out what the reports show as ended."""
        for key, ordered in list(self._ordered.items()):
            store = stores.get(key[1])
            copy = store.copies.get(key[0]) if store else None
            if store is None or (copy is not None and copy.complete):
                del self._ordered[key]
                self._failed.pop(key, None)
                if store is not None:
                    yield EndedCopy(*key, ordered.cause, now - ordered.ordered_at)
                continue
            # The error of an earlier try stands in the reports until the store has begun anew.
            if copy is not None and copy.error and ordered.begun_at and now - ordered.begun_at > _REPORT_LAG_S:
                error = copy.error
            elif copy is None and ordered.begun_at and now - ordered.begun_at > _START_TIMEOUT_S:
                error = "the store does not report it"
            else:
                continue
            if failed := self.fail(key, error, now, config):
                yield failed

    @property
    def under_way(self) -> frozenset[Key]:
        return frozenset(self._ordered)

    def avoid(self, now: float, config: PolicyConfig) -> frozenset[Key]:
        """Where packs are not brought now, because it failed lately."""
        forget_before = now - config.copy_backoff_max_s
        self._failed = {key: one for key, one in self._failed.items() if one.not_before > forget_before}
        return frozenset(key for key, one in self._failed.items() if one.not_before > now)

    # Losses

    def left(self, store: StoreStatus, until: float) -> None:
        """The store fell silent; what it held counts until then."""
        self._away[store.store_id] = (store, until)

    def returned(self, store: StoreStatus, before: StoreStatus | None) -> None:
        """A store reports. What another process of it held and this one has not, is lost."""
        away = self._away.pop(store.store_id, None)
        known = before or (away[0] if away else None)
        if known is not None and known.incarnation != store.incarnation:
            self.lost |= {copy.pack_id for copy in known.copies.values() if copy.complete} - store.copies.keys()

    def away(self, now: float) -> dict[str, StoreStatus]:
        """Stores that may still come back."""
        for store_id, (store, until) in list(self._away.items()):
            if until <= now:
                del self._away[store_id]
                self.lost |= {copy.pack_id for copy in store.copies.values() if copy.complete}
        return {store_id: store for store_id, (store, _) in self._away.items()}

    def keep_lost(self, held: Set[str]) -> None:
        """Losses that were made good count no more, nor do those of packs that nobody remembers."""
        self.lost = {pack_id for pack_id in self.lost - held if pack_id in self.recent_packs}

    def forget(self, pack_id: str) -> None:
        """The pack exists no more: it is not brought anywhere until it is used again."""
        self.recent_packs.forget(pack_id)
        self.lost.discard(pack_id)

    # Guards

    def retains_due(
        self,
        retained: Mapping[str, tuple[str, ...]],
        stores: Mapping[str, StoreStatus],
        now: float,
        config: PolicyConfig,
    ) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Stores that are to be told now what to retain: it changed, or the lease is to be renewed."""
        for gone in self._told.keys() - stores.keys():
            del self._told[gone]
        for store_id, packs in retained.items():
            store, told = stores[store_id], self._told.get(store_id)
            if told is None or told.incarnation != store.incarnation:
                due = bool(packs) or any(copy.retained for copy in store.copies.values())
            elif frozenset(told.packs) != frozenset(packs):
                due = True
            else:
                due = bool(packs) and now >= (told.renew_at if told.packs == packs else told.reorder_at)
            if due:
                renew_at = now + config.retention_s / 3
                self._told[store_id] = _RetentionLease(store.incarnation, packs, renew_at, now + _RETAIN_RETRY_S)
                yield store_id, packs

    def not_told(self, store_id: str, now: float) -> None:
        """The store did not take its retained_packs: it is told again soon."""
        if told := self._told.get(store_id):
            self._told[store_id] = replace(told, renew_at=now + _RETAIN_RETRY_S)
