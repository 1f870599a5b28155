"""The cluster as its workers and stores report it.

Reports arrive in two ways: through the broker (load; within a tenth of a second of a change, else twice a second) and
on a Watch stream to each peer (slots and copies, at once). They may overtake each other, so while a worker's stream is
open its slot is taken from the stream only, which keeps order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cachetools import FIFOCache

from torchrelay.scheduler.policy.core import StoreStatus, WorkerStatus

_SUSPICION_S = 0.25  # reports sent before a fault may still arrive within this time
_MAX_FENCED = 1024


@dataclass(frozen=True)
class LostPeers:
    """Workers and stores that stopped reporting."""

    workers: tuple[WorkerStatus, ...]
    stores: tuple[StoreStatus, ...]


class Membership:
    """The last report of every present worker and store; owned by the policy."""

    def __init__(self, fence_s: float) -> None:
        self._fence_s = fence_s
        self.workers: dict[str, WorkerStatus] = {}
        self.stores: dict[str, StoreStatus] = {}
        self._streaming: dict[str, str] = {}  # worker id -> incarnation whose stream is open
        self._fenced: FIFOCache[str, float] = FIFOCache(_MAX_FENCED)  # incarnation -> ignored until
        self._suspect_since: dict[str, float] = {}

    def accept_worker(self, worker: WorkerStatus, streamed: bool) -> WorkerStatus | None:
        """Stores a report. Returns the worker as it is now; None if the report is from a process known to be dead."""
        if self._is_fenced(worker.incarnation, worker.seen_at):
            return None
        old = self.workers.get(worker.worker_id)
        if old is not None and old.incarnation != worker.incarnation:
            self._fence(old.incarnation, worker.seen_at)
        if streamed:
            self._streaming[worker.worker_id] = worker.incarnation
        elif old is not None and self._streaming.get(worker.worker_id) == worker.incarnation == old.incarnation:
            worker = replace(worker, slot=old.slot)
        self.workers[worker.worker_id] = worker
        since = self._suspect_since.get(worker.worker_id)
        if since is not None and worker.seen_at > since + _SUSPICION_S:
            del self._suspect_since[worker.worker_id]
        return worker

    def accept_store(self, store: StoreStatus) -> StoreStatus | None:
        if self._is_fenced(store.incarnation, store.seen_at):
            return None
        self.stores[store.store_id] = store
        return store

    def _is_fenced(self, incarnation: str, now: float) -> bool:
        return self._fenced.get(incarnation, 0.0) > now

    def stream_closed(self, worker_id: str) -> None:
        """From now on the worker's slot is taken from any report."""
        self._streaming.pop(worker_id, None)

    def suspect(self, worker_id: str, now: float) -> None:
        """A gateway saw the worker fail: nothing is placed there until it reports again."""
        if worker_id in self.workers:
            self._suspect_since.setdefault(worker_id, now)

    def is_suspect(self, worker_id: str) -> bool:
        return worker_id in self._suspect_since

    def drop_worker(self, worker_id: str, now: float, gone: bool = True) -> WorkerStatus | None:
        """The worker is lost. ``gone``: so is its process, and reports that it sent before are ignored for a while."""
        self.stream_closed(worker_id)
        self._suspect_since.pop(worker_id, None)
        worker = self.workers.pop(worker_id, None)
        if worker is not None and gone:
            self._fence(worker.incarnation, now)
        return worker

    def drop_store(self, store_id: str, now: float, gone: bool = True) -> StoreStatus | None:
        store = self.stores.pop(store_id, None)
        if store is not None and gone:
            self._fence(store.incarnation, now)
        return store

    def _fence(self, incarnation: str, now: float) -> None:
        self._fenced[incarnation] = now + self._fence_s

    def expire(self, now: float, stale_s: float, reports_complete_since: float = 0.0) -> LostPeers:
        """Removes and returns all peers that have not reported for ``stale_s`` seconds. A report brings them back.

        ``reports_complete_since``: reports may be missing from before (the broker was away); silence counts from then.
        """
        oldest = now - stale_s
        if reports_complete_since > oldest:
            return LostPeers((), ())
        workers = tuple(worker for worker in self.workers.values() if worker.seen_at < oldest)
        stores = tuple(store for store in self.stores.values() if store.seen_at < oldest)
        for worker in workers:
            self.drop_worker(worker.worker_id, now, gone=False)
        for store in stores:
            self.drop_store(store.store_id, now, gone=False)
        return LostPeers(workers, stores)

    def store_of(self, host_id: str) -> StoreStatus | None:
        """The param-store of a host."""
        return next((store for store in self.stores.values() if store.host_id == host_id), None)

    def whole_holders(self, pack_id: str) -> tuple[str, ...]:
        """Stores that have all of the pack."""
        stores = self.stores.values()
        return tuple(store.store_id for store in stores if pack_id in store.copies and store.copies[pack_id].complete)

    @property
    def largest_slot_bytes(self) -> int:
        """Weights the largest known slot can hold: its host's arena, where it computes in place. 0: none known."""
        hosts = {worker.host_id for worker in self.workers.values()}
        return max((store.arena_target_bytes for store in self.stores.values() if store.host_id in hosts), default=0)

    @property
    def largest_kv_pool_bytes(self) -> int:
        return max((worker.kv_pool_bytes for worker in self.workers.values()), default=0)
