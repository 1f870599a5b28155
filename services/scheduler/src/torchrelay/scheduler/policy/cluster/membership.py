"""The workers and stores of the cluster, as they report themselves.

Reports arrive in two ways: through the broker (load; within a tenth of a second of a change, else twice a second) and
on a Watch stream to each peer (slots and copies, at once; heartbeats between them). They may overtake each other, so
while a worker's stream is open its slot is taken from the stream only, which preserves order.

A peer is present while reports arrive in either way, so an outage of the broker loses no peer. A worker whose engine
has work and does not advance is lost too, and stays lost until the engine advances.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from torchrelay.common.liveness import EngineProgress, Liveness
from torchrelay.common.recent import Recent
from torchrelay.scheduler.policy.cluster.free_workers import FreeWorkers
from torchrelay.scheduler.policy.cluster.pack_holders import PackHolders
from torchrelay.scheduler.policy.cluster.slot_sizes import SlotSizes
from torchrelay.scheduler.policy.storage_tiers import Tier
from torchrelay.scheduler.policy.types import BOTH, InstancePhase, Role, Roles, StoreStatus, WorkerStatus

_SUSPICION_S = 0.25  # reports sent before a fault may still arrive within this time
_MAX_FENCED = 16_384
_MAX_DISKS = 4096


@dataclass(frozen=True)
class LostWorker:
    worker: WorkerStatus
    is_stalled: bool  # it sends reports, but its engine does not advance
    why: str  # a clause that follows the worker's name


@dataclass(frozen=True)
class LostPeers:
    """Workers and stores that are silent or stalled."""

    workers: tuple[LostWorker, ...]
    stores: tuple[StoreStatus, ...]


class Membership:
    """The last report of every present worker and store; owned by the policy."""

    def __init__(self, fence_s: float) -> None:
        self._fence_s = fence_s
        self.workers: dict[str, WorkerStatus] = {}
        self.free_workers = FreeWorkers()  # workers that report a free slot, and stay
        self.stores: dict[str, StoreStatus] = {}
        self.stores_by_host: dict[str, StoreStatus] = {}
        self._holders = PackHolders()
        self._disk_holders = PackHolders()
        self._disks: Recent[str, frozenset[str]] = Recent(_MAX_DISKS)  # incarnation of a store -> packs on its disk
        self._streaming: dict[str, str] = {}  # worker id -> incarnation whose stream is open
        self._fenced: Recent[str, float] = Recent(_MAX_FENCED)  # incarnation -> ignored until
        # Incarnation of a store -> when another process reported by its id; infinite once it was named as a duplicate.
        self._replaced: Recent[str, float] = Recent(_MAX_FENCED)
        self._suspect_since: dict[str, float] = {}
        self._liveness: dict[str, Liveness] = {}  # by worker id
        self._store_liveness: dict[str, Liveness] = {}
        self._check_at = 0.0  # no peer can be lost before
        self._stalled: Recent[str, EngineProgress] = Recent(_MAX_FENCED)  # incarnation -> progress when it was lost
        self.sizes = SlotSizes()
        self._num_slots: Counter[tuple[str, int]] = Counter()  # by host and devices per slot

    def accept_worker(self, worker: WorkerStatus, streamed: bool) -> WorkerStatus | None:
        """Stores a report. Returns the worker's updated status; None if the report is from a process known to be dead
        or stalled.
        """
        if self._is_fenced(worker.incarnation, worker.seen_at) or self._is_stalled(worker):
            return None
        old = self.workers.get(worker.worker_id)
        if old is not None and old.incarnation != worker.incarnation:
            self._fence(old.incarnation, worker.seen_at)
            del self._liveness[worker.worker_id]
        self._liveness.setdefault(worker.worker_id, Liveness(worker.seen_at)).observe(worker.progress, worker.seen_at)
        if streamed:
            self._streaming[worker.worker_id] = worker.incarnation
        elif old is not None and self._streaming.get(worker.worker_id) == worker.incarnation == old.incarnation:
            worker = replace(worker, slot=old.slot)
        self._put_worker(worker)
        self.sizes.worker(worker)
        self._end_suspicion(worker.worker_id)
        return worker

    def set_roles(self, worker_id: str, roles: Roles) -> None:
        """Sets the roles of the worker's slot as its reply confirmed them, before its stream reports them."""
        if worker := self.workers.get(worker_id):
            self._put_worker(replace(worker, slot=replace(worker.slot, roles=roles)))

    def accept_store(self, store: StoreStatus) -> StoreStatus | None:
        """Stores a report. Returns None if it is from a process that is known to be dead, or that another process
        replaced and that lives: then the newer process stays the store of this id.
        """
        if self._is_fenced(store.incarnation, store.seen_at):
            return None
        before = self.stores.get(store.store_id)
        if before is not None and before.incarnation != store.incarnation:
            if store.incarnation in self._replaced:
                return None
            self._replaced[before.incarnation] = store.seen_at
            self._disks.pop(before.incarnation, None)
        if store.disk_pack_ids is not None:
            self._disks[store.incarnation] = store.disk_pack_ids
        elif (on_disk := self._disks.get(store.incarnation)) is not None:
            store = replace(store, disk_pack_ids=on_disk)
        self.sizes.store(store)
        self._holders.change(store.store_id, before.copies.keys() if before else frozenset(), store.copies.keys())
        self._disk_holders.change(
            store.store_id, (before and before.disk_pack_ids) or frozenset(), store.disk_pack_ids or frozenset()
        )
        self.stores[store.store_id] = self.stores_by_host[store.host_id] = store
        self._store_liveness.setdefault(store.store_id, Liveness(store.seen_at)).record_message(store.seen_at)
        return store

    def finds_duplicate(self, store: StoreStatus) -> bool:
        """Whether a refused report shows that two stores with one id live; True once for each of them."""
        if store.seen_at - self._replaced.get(store.incarnation, math.inf) <= _SUSPICION_S:
            return False
        self._replaced[store.incarnation] = math.inf
        return True

    def _put_worker(self, worker: WorkerStatus) -> None:
        if (before := self.workers.get(worker.worker_id)) is not None:
            self._remove_slot(before)
        self._num_slots[worker.host_id, worker.num_devices] += 1
        self.workers[worker.worker_id] = worker
        if worker.slot.phase is InstancePhase.FREE and not worker.is_leaving:
            self.free_workers.put(worker)
        else:
            self.free_workers.discard(worker.worker_id)

    def _remove_slot(self, worker: WorkerStatus) -> None:
        key = worker.host_id, worker.num_devices
        self._num_slots[key] -= 1
        if not self._num_slots[key]:
            del self._num_slots[key]

    def beat_worker(self, worker_id: str, incarnation: str, progress: EngineProgress, now: float) -> bool:
        """Records a heartbeat, which contains no load. Ignored if the worker is not present. True if it ends a
        suspicion.
        """
        worker = self.workers.get(worker_id)
        if worker is None or worker.incarnation != incarnation:
            return False
        self._liveness[worker_id].observe(progress, now)
        return self._end_suspicion(worker_id)

    def beat_store(self, store_id: str, incarnation: str, now: float) -> None:
        store = self.stores.get(store_id)
        if store is not None and store.incarnation == incarnation:
            self._store_liveness[store_id].record_message(now)

    def _is_stalled(self, worker: WorkerStatus) -> bool:
        """Whether the worker was lost because its engine stalled and the engine has not advanced since."""
        before, now = self._stalled.get(worker.incarnation), worker.progress
        return before is not None and now.has_work and now.num_advances == before.num_advances

    def _is_fenced(self, incarnation: str, now: float) -> bool:
        return self._fenced.get(incarnation, 0.0) > now

    def stream_closed(self, worker_id: str) -> None:
        """Accepts the worker's slot from any report from now on."""
        self._streaming.pop(worker_id, None)

    def suspect(self, worker_id: str, now: float) -> None:
        """Suspects a worker that a gateway saw fail: nothing is placed there until it reports again."""
        if worker_id in self.workers:
            self._suspect_since.setdefault(worker_id, now)

    def _end_suspicion(self, worker_id: str) -> bool:
        """Ends the suspicion if the engine has advanced since; a worker whose engine hangs may send reports all the
        time.
        """
        since = self._suspect_since.get(worker_id)
        if since is None or self._liveness[worker_id].advanced_at <= since + _SUSPICION_S:
            return False
        del self._suspect_since[worker_id]
        return True

    @property
    def suspects(self) -> frozenset[str]:
        return frozenset(self._suspect_since)

    def is_suspect(self, worker_id: str) -> bool:
        return worker_id in self._suspect_since

    def drop_worker(self, worker_id: str, now: float, gone: bool = True) -> WorkerStatus | None:
        """Removes a lost worker. ``gone``: its process has ended, and reports that it sent before are ignored for a
        while.
        """
        self.stream_closed(worker_id)
        self._suspect_since.pop(worker_id, None)
        self._liveness.pop(worker_id, None)
        worker = self.workers.pop(worker_id, None)
        if worker is not None:
            self._remove_slot(worker)
        self.free_workers.discard(worker_id)
        self.sizes.worker_gone(worker_id, now)
        if worker is not None and gone:
            self._fence(worker.incarnation, now)
        return worker

    def drop_store(self, store_id: str, now: float, gone: bool = True) -> StoreStatus | None:
        self._store_liveness.pop(store_id, None)
        store = self.stores.pop(store_id, None)
        if store is not None:
            self._holders.drop(store_id, store.copies.keys())
            self._disk_holders.drop(store_id, store.disk_pack_ids or frozenset())
        if store is not None and self.stores_by_host.get(store.host_id) is store:
            del self.stores_by_host[store.host_id]
            self.sizes.store_gone(store.host_id, now)
        if store is not None and gone:
            self._disks.pop(store.incarnation, None)
            self._fence(store.incarnation, now)
        return store

    def _fence(self, incarnation: str, now: float) -> None:
        self._fenced[incarnation] = now + self._fence_s

    def expire(self, now: float, stale_s: float, listening_since: float = 0.0) -> LostPeers:
        """Removes and returns all silent and stalled peers. A report brings a peer back; a stalled worker's report must
        show that its engine advanced.

        ``listening_since``: silence counts only from then, because no reports could arrive before.
        """
        if now < self._check_at:
            return LostPeers((), ())
        for liveness in (*self._liveness.values(), *self._store_liveness.values()):
            liveness.listening_since(listening_since)
        workers = tuple(filter(None, (self._lost(worker, now, stale_s) for worker in self.workers.values())))
        liveness_of = self._store_liveness
        stores = tuple(store for key, store in self.stores.items() if liveness_of[key].is_silent(now, stale_s))
        for lost in workers:
            if lost.is_stalled:
                self._stalled[lost.worker.incarnation] = self._liveness[lost.worker.worker_id].progress
            self.drop_worker(lost.worker.worker_id, now, gone=False)
        for store in stores:
            self.drop_store(store.store_id, now, gone=False)
        # A peer that reports after now cannot be lost before any peer that is known now.
        reported = (liveness.last_message_at for liveness in (*self._liveness.values(), *liveness_of.values()))
        advanced = (liveness.advanced_at for liveness in self._liveness.values() if liveness.progress.has_work)
        self._check_at = min((now, *reported, *advanced)) + stale_s
        return LostPeers(workers, stores)

    def _lost(self, worker: WorkerStatus, now: float, stale_s: float) -> LostWorker | None:
        liveness = self._liveness[worker.worker_id]
        why = liveness.fault(now, stale_s)
        return LostWorker(worker, not liveness.is_silent(now, stale_s), why) if why else None

    def store_of(self, host_id: str) -> StoreStatus | None:
        """The param-store of a host."""
        return self.stores_by_host.get(host_id)

    def why_no_load(self) -> str:
        """Why no model can be loaded in any slot, full or free; empty if models can be loaded."""
        if not self.workers:
            return "no worker answers"
        hosts = {store.host_id for store in self.stores.values()}
        playable: set[Role] = set()
        for worker in self.workers.values():
            playable |= worker.playable_roles if worker.host_id in hosts else frozenset()
            if playable >= BOTH:
                return ""
        if not playable:
            silent = sorted({worker.host_id for worker in self.workers.values()} - hosts)
            return f"the param-store of host {' and '.join(silent[:3])} does not answer"
        missing = " and ".join(role.name.lower() for role in sorted(BOTH - playable))
        return f"no worker that can {missing} answers" if missing else ""

    def is_held(self, pack_id: str) -> bool:
        """Whether a store has the pack in RAM, or receives it."""
        return any(not self.stores[store_id].copies[pack_id].error for store_id in self._holders.any_of(pack_id))

    def is_on_disk(self, pack_id: str) -> bool:
        """Whether a store has the pack on its disk."""
        return bool(self._disk_holders.any_of(pack_id))

    def nearest_tier(self, pack_id: str, num_devices: int) -> Tier:
        """The nearest tier from which a slot of ``num_devices``, free or not, can get the pack."""
        if self.is_held(pack_id):
            whole = (self.stores[store_id] for store_id in self.whole_holders(pack_id))
            return Tier.HOST if any(self._num_slots[store.host_id, num_devices] for store in whole) else Tier.PEER
        return Tier.DISK if self.is_on_disk(pack_id) else Tier.REMOTE

    def holders(self, pack_id: str) -> list[StoreStatus]:
        """Stores with a copy of the pack in RAM, whole or not, in order of arrival."""
        return [self.stores[store_id] for store_id in self._holders.of(pack_id)]

    def disk_holders(self, pack_id: str) -> list[StoreStatus]:
        """Stores that have the pack on disk, in order of arrival."""
        return [self.stores[store_id] for store_id in self._disk_holders.of(pack_id)]

    def whole_holders(self, pack_id: str) -> tuple[str, ...]:
        """Stores that have all of the pack in RAM."""
        return tuple(store.store_id for store in self.holders(pack_id) if store.copies[pack_id].complete)
