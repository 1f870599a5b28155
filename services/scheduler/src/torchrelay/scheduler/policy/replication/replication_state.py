"""The replicator's state between its decisions: uses, failures, losses, and the packs that stores were told to retain.

The copies that it ordered are transfers with a cause; see ``relay.transfers``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle

from torchrelay.common.recent import Recent
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.effects import RetainCommand
from torchrelay.scheduler.policy.replication.pack_worth import PackWorth
from torchrelay.scheduler.policy.replication.repair import CopyOrder, Steps
from torchrelay.scheduler.policy.types import MAX_VERSIONS, CopyCause, Model, StoreStatus

_KEEP_TRIES = 5  # failed copies before a lost, unused pack is given up, which may have been deleted
_RETAIN_RETRY_S = 2.0  # after a refusal; also the shortest time between leases for changes on disk
_WORTH_DELAYS_S = tuple(2.0 + number / 4 for number in range(16))

CopyKey = tuple[str, str]  # pack, store


@dataclass(frozen=True)
class PackUse:
    """The last use of a pack."""

    model: Model
    last_used: float


class RecentPacks:
    """The recently used packs; the longest unused are evicted first."""

    def __init__(self, max_packs: int = MAX_VERSIONS) -> None:
        # Setting a key moves it to the end of the queue and reading does not, so the first key is the longest unused.
        self._uses: Recent[str, PackUse] = Recent(max_packs)

    def __contains__(self, pack_id: str) -> bool:
        return pack_id in self._uses

    def __iter__(self) -> Iterator[PackUse]:
        return iter(self._uses.values())

    def use(self, pack_id: str) -> PackUse:
        return self._uses[pack_id]

    def note(self, model: Model, now: float) -> None:
        """Records a use of the model."""
        self._uses[model.pack_id] = PackUse(model, now)

    def forget(self, pack_id: str) -> None:
        """Forgets the pack, as if it had never been used."""
        self._uses.pop(pack_id, None)


class PackWorths:
    """The worth of copies, recomputed every few seconds, at a different time for each pack, so that no decision has to
    compute all of them.
    """

    def __init__(self, max_packs: int = MAX_VERSIONS) -> None:
        self._worths: Recent[str, tuple[PackWorth, float]] = Recent(max_packs)  # worth, valid until
        self._delays_s = cycle(_WORTH_DELAYS_S)

    def of(self, pack_id: str, now: float, work_out: Callable[[], PackWorth]) -> PackWorth:
        known = self._worths.get(pack_id)
        if known is not None and now < known[1]:
            return known[0]
        worth = work_out()
        self._worths[pack_id] = worth, now + next(self._delays_s)
        return worth


@dataclass(frozen=True)
class _FailedCopy:
    times: int
    not_before: float


@dataclass(frozen=True)
class _RetentionLease:
    """The packs that a store was told to retain in RAM, and the packs on disk whose order it was told."""

    incarnation: str
    packs: frozenset[str]
    on_disk: frozenset[str] | None
    renew_at: float
    not_before: float  # for changes on disk only

    def is_due(self, packs: Iterable[str], on_disk: frozenset[str] | None, now: float) -> bool:
        """Whether the store must be told again: because the packs changed, or the lease is to be renewed. A new order
        of the same packs waits for the renewal, because the worth of packs changes all the time.
        """
        if self.packs != frozenset(packs):
            return True
        return now >= (self.renew_at if self.on_disk == on_disk else self.not_before)


@dataclass
class ReplicationState:
    """Uses, failures, losses and leases. Owned by the state."""

    recent_packs: RecentPacks = field(default_factory=RecentPacks)
    worths: PackWorths = field(default_factory=PackWorths)
    settled: frozenset[str] = frozenset()  # recent packs that have had all their copies
    lost: set[str] = field(default_factory=set)  # packs of which a copy was lost with a host
    due_at: float = 0.0
    decision: Steps[None] | None = None  # begun, and continued by each tick
    orders: deque[CopyOrder] = field(default_factory=deque)  # decided
    num_short: int = 0  # recent packs that lack copies
    _failed: dict[CopyKey, _FailedCopy] = field(default_factory=dict)
    _away: dict[str, tuple[StoreStatus, float]] = field(default_factory=dict)  # until when each may come back
    _leases: dict[str, _RetentionLease] = field(default_factory=dict)  # by store
    _streamed: dict[str, tuple[str, frozenset[str]]] = field(default_factory=dict)  # incarnation, whole copies

    # Failed copies

    def fail(self, key: CopyKey, cause: CopyCause, now: float, config: PolicyConfig) -> None:
        """Records a failed copy: the pack is not copied to this store for a while, and an unused pack is given up after
        several failures.
        """
        times = self._failed[key].times + 1 if key in self._failed else 1
        pause_s = min(config.copy_backoff_s * 2 ** (times - 1), config.copy_backoff_max_s)
        self._failed[key] = _FailedCopy(times, now + pause_s)
        num_tries = sum(failed.times for (pack_id, _), failed in self._failed.items() if pack_id == key[0])
        if cause is CopyCause.KEEP and num_tries >= _KEEP_TRIES:
            self.lost.discard(key[0])

    def clear_failures(self, key: CopyKey) -> None:
        self._failed.pop(key, None)

    def avoid(self, now: float, config: PolicyConfig) -> frozenset[CopyKey]:
        """Packs and stores whose copies failed recently, which are not tried now."""
        forget_before = now - config.copy_backoff_max_s
        self._failed = {key: failed for key, failed in self._failed.items() if failed.not_before > forget_before}
        return frozenset(key for key, failed in self._failed.items() if failed.not_before > now)

    # Losses

    def left(self, store: StoreStatus, until: float) -> None:
        """Records a silent store, whose copies count until ``until``."""
        self._away[store.store_id] = (store, until)
        self._streamed.pop(store.store_id, None)

    def returned(self, store: StoreStatus, before: StoreStatus | None) -> None:
        """Records a report of a store. Copies that its earlier process held and this process does not are lost."""
        away = self._away.pop(store.store_id, None)
        known = before or (away[0] if away else None)
        if known is not None and known.incarnation != store.incarnation:
            self.lost |= {copy.pack_id for copy in known.copies.values() if copy.complete} - store.copies.keys()

    def evicted(self, streamed: StoreStatus) -> list[str]:
        """Packs that the store no longer has and had a whole copy of in its last report on the same stream."""
        whole = frozenset(copy.pack_id for copy in streamed.copies.values() if copy.complete)
        incarnation, before = self._streamed.get(streamed.store_id, ("", whole))
        self._streamed[streamed.store_id] = streamed.incarnation, whole
        return sorted(before - streamed.copies.keys()) if incarnation == streamed.incarnation else []

    def away(self, now: float) -> dict[str, StoreStatus]:
        """Stores that may still come back."""
        for store_id, (store, until) in list(self._away.items()):
            if until <= now:
                del self._away[store_id]
                self.lost |= {copy.pack_id for copy in store.copies.values() if copy.complete}
        return {store_id: store for store_id, (store, _) in self._away.items()}

    def keep_lost(self, is_held: Callable[[str], bool]) -> None:
        """Forgets losses of packs that are held again or no longer remembered."""
        self.lost = {pack_id for pack_id in self.lost if pack_id in self.recent_packs and not is_held(pack_id)}

    def forget(self, pack_id: str) -> None:
        """Forgets a pack that no longer exists, so that it is not copied anywhere until it is used again."""
        self.recent_packs.forget(pack_id)
        self.lost.discard(pack_id)

    # Retention

    def retain(
        self,
        retained_packs: Mapping[str, tuple[str, ...]],
        disk_order: Sequence[str],
        stores: Mapping[str, StoreStatus],
        now: float,
        config: PolicyConfig,
        command: Callable[[RetainCommand], None],
    ) -> Iterator[int]:
        """Commands each store that is due now to retain its packs, because the packs in RAM changed, the packs on disk
        changed a while ago, or the lease is to be renewed. Yields the work of each step.
        """
        self._leases = {store_id: lease for store_id, lease in self._leases.items() if store_id in stores}
        disk_ranks = {pack_id: rank for rank, pack_id in enumerate(disk_order)}
        yield len(disk_order) // 4
        for store_id, packs in retained_packs.items():
            yield 1
            store, lease = stores[store_id], self._leases.get(store_id)
            if lease is not None and lease.incarnation == store.incarnation:
                if not lease.is_due(packs, store.disk_pack_ids, now):
                    continue
                retains_any = bool(lease.packs)
            else:
                retains_any = any(copy.retained for copy in store.copies.values())
            self._leases[store_id] = _RetentionLease(
                store.incarnation,
                frozenset(packs),
                store.disk_pack_ids,
                now + config.retention_s / 3,
                now + _RETAIN_RETRY_S,
            )
            disk_packs = _in_order(store, disk_ranks)
            if packs or disk_packs or retains_any:
                command(RetainCommand(store_id, packs, config.retention_s, disk_packs))
            yield 1 + len(disk_packs) // 8

    def retain_failed(self, store_id: str, now: float) -> None:
        """Schedules a retry for a store that did not accept its lease."""
        if lease := self._leases.get(store_id):
            self._leases[store_id] = replace(lease, renew_at=now + _RETAIN_RETRY_S)


def _in_order(store: StoreStatus, ranks: Mapping[str, int]) -> tuple[str, ...]:
    """The packs on the store's disk and its copies in RAM, which it may write to disk next, in the order of
    ``ranks``.
    """
    if store.disk_pack_ids is None:
        return ()
    return tuple(sorted((store.disk_pack_ids | store.copies.keys()) & ranks.keys(), key=ranks.__getitem__))
