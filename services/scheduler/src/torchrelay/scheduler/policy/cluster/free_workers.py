"""Workers with a free slot, by kind of slot and by host, so that a search for the best slot need not visit all."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torchrelay.scheduler.policy.types import BOTH, DECODES, Model, Role, Roles, SlotClass, WorkerStatus


class SlotKind(NamedTuple):
    """Properties of a slot that matter to a model, except its host."""

    slot_class: SlotClass
    playable_roles: Roles
    preferred_role: Role | None
    kv_pool_bytes: int
    hands_over: bool

    @classmethod
    def of(cls, worker: WorkerStatus) -> SlotKind:
        roles, preferred_role = worker.playable_roles, worker.preferred_role
        return cls(worker.slot_class, roles, preferred_role, worker.kv_pool_bytes, worker.hands_over)

    def roles_for(self, kv_bytes: int) -> Roles:
        """Roles that the slot can play for requests that need ``kv_bytes`` of KV each."""
        roles = self.playable_roles if self.kv_pool_bytes >= kv_bytes else self.playable_roles - DECODES
        return roles if self.hands_over or roles >= BOTH else frozenset()


class FreeWorkers(Mapping[str, WorkerStatus]):
    def __init__(self, workers: Iterable[WorkerStatus] = ()) -> None:
        self._by_id: dict[str, WorkerStatus] = {}
        self._of_kind: dict[SlotKind, list[str]] = {}  # in order
        self._on_host: dict[str, dict[str, None]] = {}
        for worker in workers:
            self.put(worker)

    def __getitem__(self, worker_id: str) -> WorkerStatus:
        return self._by_id[worker_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def put(self, worker: WorkerStatus) -> None:
        before = self._by_id.get(worker.worker_id)
        self._by_id[worker.worker_id] = worker
        if before is not None:
            if before.host_id == worker.host_id and SlotKind.of(before) == SlotKind.of(worker):
                return
            self._forget(before)
        insort(self._of_kind.setdefault(SlotKind.of(worker), []), worker.worker_id)
        self._on_host.setdefault(worker.host_id, {})[worker.worker_id] = None

    def discard(self, worker_id: str) -> None:
        if (worker := self._by_id.pop(worker_id, None)) is not None:
            self._forget(worker)

    def _forget(self, worker: WorkerStatus) -> None:
        ids = self._of_kind[kind := SlotKind.of(worker)]
        del ids[bisect_left(ids, worker.worker_id)]
        if not ids:
            del self._of_kind[kind]
        on_host = self._on_host[worker.host_id]
        del on_host[worker.worker_id]
        if not on_host:
            del self._on_host[worker.host_id]

    def on_host(self, host_id: str) -> Collection[str]:
        return self._on_host.get(host_id, ())

    def kinds(self, model: Model) -> list[tuple[SlotKind, Sequence[str]]]:
        """The kinds in which the model runs, each with its workers in the order of their ids."""
        return [(kind, ids) for kind, ids in self._of_kind.items() if model.fits(kind.slot_class)]
