"""Capacity of the slots that are present or were a short time ago."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from torchrelay.scheduler.policy.types import Role, SlotClass, StoreStatus, WorkerStatus

_REMEMBERED_S = 600.0


class SlotSize(NamedTuple):
    slot_class: SlotClass
    weights_bytes: int = 0  # the host's arena, or less if the slot's GPUs hold less; 0: no store on the host answers
    kv_pool_bytes: int = 0  # 0: the slot does not decode

    @property
    def unlabelled(self) -> SlotSize:
        return self._replace(slot_class=self.slot_class._replace(labels=frozenset()))


class _Slot(NamedTuple):
    host_id: str
    slot_class: SlotClass
    kv_pool_bytes: int


class SlotSizes:
    """Number of slots of each size; clusters have few sizes."""

    def __init__(self) -> None:
        self._slots: dict[str, _Slot] = {}  # by worker
        self._on_host = defaultdict[str, set[str]](set)
        self._arenas: dict[str, int] = {}  # by host
        self._present: Counter[SlotSize] = Counter()
        self._fitting: dict[SlotClass, list[SlotSize]] = {}  # present sizes by the class wanted, once it was
        self._gone: dict[SlotSize, float] = {}  # sizes without a slot -> when the last slot went

    def worker(self, worker: WorkerStatus) -> None:
        """Records a present worker and its slot."""
        pool_bytes = worker.kv_pool_bytes if Role.DECODE in worker.playable_roles else 0
        slot = _Slot(worker.host_id, worker.slot_class, pool_bytes)
        if self._slots.get(worker.worker_id) != slot:
            self.worker_gone(worker.worker_id, worker.seen_at)
            self._slots[worker.worker_id] = slot
            self._on_host[slot.host_id].add(worker.worker_id)
            self._add(self._size(slot))

    def worker_gone(self, worker_id: str, now: float) -> None:
        if slot := self._slots.pop(worker_id, None):
            self._on_host[slot.host_id].discard(worker_id)
            self._remove(self._size(slot), now)
            if not self._on_host[slot.host_id]:
                del self._on_host[slot.host_id]

    def on_host(self, host_id: str) -> Collection[str]:
        """Workers on the host."""
        return self._on_host.get(host_id, ())

    def arena_share(self, host_id: str) -> int:
        """Bytes of the host's arena for each of its slots that compute in it."""
        in_arena = [key for key in self.on_host(host_id) if not self._slots[key].slot_class.weights_bytes]
        return self._arenas.get(host_id, 0) // max(len(in_arena), 1)

    def store(self, store: StoreStatus) -> None:
        self._set_arena(store.host_id, store.arena_target_bytes, store.seen_at)

    def store_gone(self, host_id: str, now: float) -> None:
        self._set_arena(host_id, 0, now)
        self._arenas.pop(host_id, None)

    def _set_arena(self, host_id: str, num_bytes: int, now: float) -> None:
        if self._arenas.get(host_id, 0) == num_bytes:
            return
        slots = [self._slots[worker_id] for worker_id in self._on_host.get(host_id, ())]
        before = [self._size(slot) for slot in slots]
        self._arenas[host_id] = num_bytes
        for slot, size in zip(slots, before, strict=True):
            self._add(self._size(slot))
            self._remove(size, now)

    def _size(self, slot: _Slot) -> SlotSize:
        arena_bytes, slot_class = self._arenas.get(slot.host_id, 0), slot.slot_class
        weights_bytes = min(arena_bytes, slot_class.weights_bytes or arena_bytes)
        return SlotSize(slot_class, weights_bytes, slot.kv_pool_bytes)

    def _add(self, size: SlotSize) -> None:
        self._present[size] += 1
        if self._present[size] == 1:
            self._fitting.clear()
        self._gone.pop(size, None)

    def _remove(self, size: SlotSize, now: float) -> None:
        self._present[size] -= 1
        if not self._present[size]:
            del self._present[size]
            self._fitting.clear()
            self._gone = {key: until for key, until in self._gone.items() if until >= now - _REMEMBERED_S}
            self._gone[size] = now

    def present(self, wanted: SlotClass) -> Sequence[SlotSize]:
        """Sizes of the present slots in which a model of this class runs, without labels, which each host may have of
        its own.
        """
        if (sizes := self._fitting.get(wanted)) is None:
            fitting = (size for size in self._present if wanted.fits(size.slot_class))
            sizes = self._fitting[wanted] = list(dict.fromkeys(size.unlabelled for size in fitting))
        return sizes

    def since(self, begin: float, wanted: SlotClass) -> list[SlotSize]:
        """Sizes of such slots that were present at any time after ``begin``."""
        gone = (size for size, until in self._gone.items() if until >= begin and wanted.fits(size.slot_class))
        return [*self.present(wanted), *gone]

    def has_lost_any(self, begin: float) -> bool:
        """Whether any size had slots after ``begin`` and has none now."""
        return any(until >= begin for until in self._gone.values())

    @property
    def has_weights(self) -> bool:
        """Whether any present slot holds weights."""
        return any(size.weights_bytes for size in self._present)

    @property
    def largest_weights_bytes(self) -> int:
        """The most weights that a present slot holds; 0 without a slot."""
        return max((size.weights_bytes for size in self._present), default=0)


def largest_pool(sizes: Iterable[SlotSize]) -> int:
    return max((size.kv_pool_bytes for size in sizes), default=0)
