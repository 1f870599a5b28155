"""Refusal of requests that no slot will serve because minimum instances hold all slots that could.

A minimum instance never gives up its slot. If any other slot could serve the request, it only waits for its turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from torchrelay.scheduler.policy.autoscaling.minimums import reserved_instances
from torchrelay.scheduler.policy.cluster.free_workers import SlotKind
from torchrelay.scheduler.policy.cluster.version_aliases import tenant_of
from torchrelay.scheduler.policy.effects import RefusalReason
from torchrelay.scheduler.policy.handlers import lifecycle
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.types import BOTH, Admission, Instance, Model, Role, Roles, SlotClass, StoreStatus


def refuse_without_slot(state: State, now: float) -> None:
    """Refuses requests whose only suitable slots have been held by minimum instances past the limit."""
    reserved = _ReservedSlots(state) if state.minimums.in_force and len(state.queues) else None
    without = {admission.key: admission for admission in reserved.without_slot()} if reserved is not None else {}
    state.without_slot_since = {key: state.without_slot_since.get(key, now) for key in without}
    for key, since in state.without_slot_since.items():
        admission = without[key]
        limit_s = lifecycle.absence_limit_s(state, admission)
        if now - since >= limit_s and reserved is not None:
            holders = reserved.holders(state.models[admission.version_id])
            message = f"{admission.model} waits for a slot, and all that could serve it are held by the minimum "
            message += f"instances of {_names(holders, admission)}"
            lifecycle.refuse(state, admission, RefusalReason.NO_CAPACITY, message, now, limit_s)


def _names(holders: Iterable[Instance], admission: Admission) -> str:
    """The holders' models, as far as the request's tenant may know them."""
    tenant = tenant_of(admission.model)
    models = {instance.model for instance in holders}
    own = sorted(model for model in models if tenant_of(model) == tenant)
    has_others = any(tenant_of(model) != tenant for model in models)
    return " and ".join([*own, *(["models of other tenants"] if has_others else [])])


@dataclass(slots=True)
class _FreeableSlots:
    """The slots of one kind that no minimum instance holds.

    ``space_bytes``: the largest space for another pack on any of their hosts, beside the packs of minimum instances.
    """

    host_ids: set[str]
    space_bytes: int = 0


@dataclass
class _ReservedSlots:
    """The slots at one moment. Workers are grouped by kind once, however many versions wait."""

    _state: State

    def without_slot(self) -> Iterator[Admission]:
        """Waiting requests that no slot could serve except the reserved ones."""
        for version_id in self._state.queues.versions:
            model = self._state.models[version_id]
            if not self._has_holder(model):
                continue
            lacks: dict[int, bool] = {}  # by KV: a version's requests need a few different amounts
            for admission in self._state.queues.waiting(version_id):
                kv_bytes = admission.kv_bytes(model)
                if kv_bytes not in lacks:
                    lacks[kv_bytes] = self._lacks_slot(model, kv_bytes)
                if lacks[kv_bytes]:
                    yield admission

    def holders(self, model: Model) -> list[Instance]:
        """Minimum instances of other models in slots that the model could use."""
        return list(self._others(model))

    def _others(self, model: Model) -> Iterator[Instance]:
        for slot_class, instances in self._holders.items():
            if model.slot_class.fits(slot_class):
                yield from (instance for instance in instances if instance.version_id != model.version_id)

    def _has_holder(self, model: Model) -> bool:
        return next(self._others(model), None) is not None

    def _lacks_slot(self, model: Model, kv_bytes: int) -> bool:
        """Whether requests with ``kv_bytes`` of KV could be served, but only with reserved slots."""
        kinds = {kind: slots for kind, slots in self._kinds.items() if model.slot_class.fits(kind.slot_class)}
        if not _covers_both_roles(kind.roles_for(kv_bytes) for kind in kinds):
            return False
        able = [kind.roles_for(kv_bytes) for kind, slots in kinds.items() if self._has_space(slots, model)]
        return not _covers_both_roles([*able, *self._own_roles(model, kv_bytes)])

    def _has_space(self, slots: _FreeableSlots, model: Model) -> bool:
        if not slots.host_ids:
            return False
        if model.pack_bytes <= slots.space_bytes:
            return True
        return any(store.host_id in slots.host_ids for store in self._state.membership.holders(model.pack_id))

    def _own_roles(self, model: Model, kv_bytes: int) -> Iterator[Roles]:
        """Roles of workers that have an instance of the version, whatever space their host's store has."""
        workers = self._state.membership.workers
        for instance in self._state.instances.of_version(model.version_id):
            if instance.staying and (worker := workers.get(instance.worker_id)) is not None:
                yield worker.roles_for(kv_bytes)

    @cached_property
    def _reserved(self) -> list[Instance]:
        reserved = reserved_instances(self._state.minimums.in_force, self._state.instances.of_version)
        return [instance for instance in map(self._state.instances.get, sorted(reserved)) if instance is not None]

    @cached_property
    def _holders(self) -> dict[SlotClass, list[Instance]]:
        """Minimum instances by the class of their slots."""
        by_class = defaultdict[SlotClass, list[Instance]](list)
        for instance in self._reserved:
            worker = self._state.membership.workers.get(instance.worker_id)
            if worker is not None and self._state.membership.store_of(worker.host_id) is not None:
                by_class[SlotClass(worker.num_devices, worker.engine)].append(instance)
        return by_class

    @cached_property
    def _kinds(self) -> dict[SlotKind, _FreeableSlots]:
        """All kinds of slots whose hosts have a store."""
        membership, reserved = self._state.membership, {instance.worker_id for instance in self._reserved}
        packs = defaultdict[str, set[str]](set)  # packs of minimum instances, by host
        for instance in self._reserved:
            packs[instance.host_id].add(instance.pack_id)
        space_bytes: dict[str, int] = {}  # by host
        kinds: dict[SlotKind, _FreeableSlots] = {}
        for worker in membership.workers.values():
            if (store := membership.store_of(worker.host_id)) is None:
                continue
            slots = kinds.setdefault(SlotKind.of(worker), _FreeableSlots(set()))
            if worker.worker_id in reserved or worker.host_id in slots.host_ids:
                continue
            if worker.host_id not in space_bytes:
                space_bytes[worker.host_id] = _space_bytes(store, packs.get(worker.host_id, set()))
            slots.host_ids.add(worker.host_id)
            slots.space_bytes = max(slots.space_bytes, space_bytes[worker.host_id])
        return kinds


def _space_bytes(store: StoreStatus, reserved_packs: set[str]) -> int:
    """The arena's space for another pack if only the pinned reserved packs stay."""
    copies = (store.copies[pack_id] for pack_id in reserved_packs if pack_id in store.copies)
    return store.arena_target_bytes - sum(copy.pack_bytes for copy in copies if copy.num_pins)


def _covers_both_roles(playable: Iterable[Roles]) -> bool:
    """Whether the slots together can play both roles."""
    played: set[Role] = set()
    for roles in playable:
        played |= roles
        if played >= BOTH:
            return True
    return False
