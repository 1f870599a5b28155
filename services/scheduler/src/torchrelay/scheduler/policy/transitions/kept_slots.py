"""Requests for which no slot will come free: minimum instances, which give theirs to nobody, hold all that could serve.

As long as a slot can be taken, waiting is a matter of turns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from torchrelay.scheduler.policy.autoscaling.minimums import kept_instances
from torchrelay.scheduler.policy.cluster.version_aliases import tenant_of
from torchrelay.scheduler.policy.core import BOTH, Admission, AttemptKey, Instance, Model, Role, WorkerStatus
from torchrelay.scheduler.policy.effects import RefusalReason
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.transitions import admissions


def refuse_without_slot(state: State, now: float) -> None:
    """Refuses who has waited so long while minimums held all slots for it."""
    kept = _KeptSlots(state) if state.minimums.in_force and len(state.queues) else None
    without = dict(kept.without_slot()) if kept is not None else {}
    state.without_slot_since = {key: state.without_slot_since.get(key, now) for key in without}
    for key, since in state.without_slot_since.items():
        admission, holders = without[key]
        limit_s = admissions.absence_limit_s(state, admission)
        if now - since >= limit_s:
            message = f"{admission.model} waits for a slot, and all that could serve it are held by the minimum "
            message += f"instances of {_names(holders, admission)}."
            admissions.refuse(state, admission, RefusalReason.NO_CAPACITY, message, now, limit_s)


def _names(holders: Iterable[Instance], admission: Admission) -> str:
    """As the request's tenant may know them."""
    tenant = tenant_of(admission.model)
    own = sorted({one.model for one in holders if tenant_of(one.model) == tenant})
    has_others = any(tenant_of(one.model) != tenant for one in holders)
    return " and ".join([*own, *(["models of other tenants"] if has_others else [])])


@dataclass
class _KeptSlots:
    _state: State

    def without_slot(self) -> Iterable[tuple[AttemptKey, tuple[Admission, list[Instance]]]]:
        """Waiting requests that no slot could serve that is not kept, and the instances that keep those that could."""
        for version_id in self._state.queues.versions:
            model = self._state.models[version_id]
            workers = [one for one in self._able if one.num_devices == model.num_devices]
            holders = [one for worker in workers if (one := self._holder(worker, model)) is not None]
            if not holders:
                continue
            rest = [one for one in workers if self._holder(one, model) is None and self._has_room(one, model)]
            rest += self._own(version_id)
            for admission in self._state.queues.waiting(version_id):
                kv_bytes = admission.kv_bytes(model)
                if _can_serve(workers, kv_bytes) and not _can_serve(rest, kv_bytes):
                    yield admission.key, (admission, holders)

    def _own(self, version_id: str) -> list[WorkerStatus]:
        """Those that have an instance of the version, whatever its host's store has room for."""
        workers, instances = self._state.membership.workers, self._state.instances.of_version(version_id)
        return [workers[one.worker_id] for one in instances if one.staying and one.worker_id in workers]

    @cached_property
    def _able(self) -> list[WorkerStatus]:
        membership = self._state.membership
        return [worker for worker in membership.workers.values() if membership.store_of(worker.host_id)]

    @cached_property
    def _kept(self) -> list[Instance]:
        kept = kept_instances(self._state.minimums.in_force, self._state.instances.of_version)
        return [one for one in map(self._state.instances.get, sorted(kept)) if one is not None]

    @cached_property
    def _by_worker(self) -> dict[str, Instance]:
        return {instance.worker_id: instance for instance in self._kept}

    @cached_property
    def _packs(self) -> dict[str, set[str]]:
        """Those that are kept, by host."""
        found = defaultdict[str, set[str]](set)
        for instance in self._kept:
            found[instance.host_id].add(instance.pack_id)
        return found

    def _holder(self, worker: WorkerStatus, model: Model) -> Instance | None:
        """The instance of another model that keeps the slot."""
        instance = self._by_worker.get(worker.worker_id)
        return instance if instance is not None and instance.version_id != model.version_id else None

    def _has_room(self, worker: WorkerStatus, model: Model) -> bool:
        store = self._state.membership.store_of(worker.host_id)
        if store is None:
            return False
        return store.room_for(
            model.pack_id, model.pack_bytes, store.copies.keys() - self._packs.get(worker.host_id, set())
        )


def _can_serve(workers: Iterable[WorkerStatus], kv_bytes: int) -> bool:
    """Whether they play both roles between them, for a request with so much KV."""
    played: set[Role] = set()
    for worker in workers:
        played |= worker.roles_for(kv_bytes)
        if played >= BOTH:
            return True
    return False
