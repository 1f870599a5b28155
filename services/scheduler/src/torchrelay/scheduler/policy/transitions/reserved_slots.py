"""Requests for which no slot will come free: minimum instances, which give theirs to nobody, hold all that could serve.

As long as a slot can be taken, waiting is a matter of turns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torchrelay.scheduler.policy.autoscaling.minimums import kept_instances
from torchrelay.scheduler.policy.cluster.version_aliases import tenant_of
from torchrelay.scheduler.policy.core import BOTH, DECODES, Admission, Instance, Model, Role, Roles, StoreStatus
from torchrelay.scheduler.policy.effects import RefusalReason
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.transitions import admissions


def refuse_without_slot(state: State, now: float) -> None:
    """Refuses who has waited so long while minimums held all slots for it."""
    kept = _ReservedSlots(state) if state.minimums.in_force and len(state.queues) else None
    without = {admission.key: admission for admission in kept.without_slot()} if kept is not None else {}
    state.without_slot_since = {key: state.without_slot_since.get(key, now) for key in without}
    for key, since in state.without_slot_since.items():
        admission = without[key]
        limit_s = admissions.absence_limit_s(state, admission)
        if now - since >= limit_s and kept is not None:
            holders = kept.holders(state.models[admission.version_id])
            message = f"{admission.model} waits for a slot, and all that could serve it are held by the minimum "
            message += f"instances of {_names(holders, admission)}"
            admissions.refuse(state, admission, RefusalReason.NO_CAPACITY, message, now, limit_s)


def _names(holders: Iterable[Instance], admission: Admission) -> str:
    """As the request's tenant may know them."""
    tenant = tenant_of(admission.model)
    models = {one.model for one in holders}
    own = sorted(model for model in models if tenant_of(model) == tenant)
    has_others = any(tenant_of(model) != tenant for model in models)
    return " and ".join([*own, *(["models of other tenants"] if has_others else [])])


class _SlotKind(NamedTuple):
    """Slots that can serve the same requests, wherever they are."""

    num_devices: int
    playable_roles: Roles
    kv_pool_bytes: int

    def roles_for(self, kv_bytes: int) -> Roles:
        return self.playable_roles if self.kv_pool_bytes >= kv_bytes else self.playable_roles - DECODES


@dataclass(slots=True)
class _Takable:
    """Slots of one kind that no minimum holds: the room that the roomiest of their hosts has for another pack, beside
    those that minimums hold.
    """

    host_ids: set[str]
    room_bytes: int = 0


@dataclass
class _ReservedSlots:
    """The slots at one moment: all workers are looked at once, however many versions wait."""

    _state: State

    def without_slot(self) -> Iterator[Admission]:
        """Waiting requests that no slot could serve that is not kept."""
        for version_id in self._state.queues.versions:
            model = self._state.models[version_id]
            if not self._are_some_held_from(model):
                continue
            lacks: dict[int, bool] = {}  # by KV: a version's requests need a few different amounts
            for admission in self._state.queues.waiting(version_id):
                kv_bytes = admission.kv_bytes(model)
                if kv_bytes not in lacks:
                    lacks[kv_bytes] = self._lacks_slot(model, kv_bytes)
                if lacks[kv_bytes]:
                    yield admission

    def holders(self, model: Model) -> list[Instance]:
        """The instances of other models that keep slots which could have this one."""
        return [one for one in self._holders.get(model.num_devices, ()) if one.version_id != model.version_id]

    def _are_some_held_from(self, model: Model) -> bool:
        return any(one.version_id != model.version_id for one in self._holders.get(model.num_devices, ()))

    def _lacks_slot(self, model: Model, kv_bytes: int) -> bool:
        """Whether slots could serve a request with so much KV, but not without those that are kept."""
        kinds = {kind: takable for kind, takable in self._kinds.items() if kind.num_devices == model.num_devices}
        if not _covers(kind.roles_for(kv_bytes) for kind in kinds):
            return False
        able = [kind.roles_for(kv_bytes) for kind, takable in kinds.items() if self._has_room(takable, model)]
        return not _covers([*able, *self._own_roles(model, kv_bytes)])

    def _has_room(self, takable: _Takable, model: Model) -> bool:
        if not takable.host_ids:
            return False
        if model.pack_bytes <= takable.room_bytes:
            return True
        return any(store.host_id in takable.host_ids for store in self._state.membership.holders(model.pack_id))

    def _own_roles(self, model: Model, kv_bytes: int) -> Iterator[Roles]:
        """Roles of workers that have an instance of the version, whatever space their host's store has."""
        workers = self._state.membership.workers
        for instance in self._state.instances.of_version(model.version_id):
            if instance.staying and (worker := workers.get(instance.worker_id)) is not None:
                yield worker.roles_for(kv_bytes)

    @cached_property
    def _kept(self) -> list[Instance]:
        kept = kept_instances(self._state.minimums.in_force, self._state.instances.of_version)
        return [one for one in map(self._state.instances.get, sorted(kept)) if one is not None]

    @cached_property
    def _holders(self) -> dict[int, list[Instance]]:
        """Instances of the version by the number of devices of their slots."""
        found = defaultdict[int, list[Instance]](list)
        for instance in self._kept:
            worker = self._state.membership.workers.get(instance.worker_id)
            if worker is not None and self._state.membership.store_of(worker.host_id) is not None:
                found[worker.num_devices].append(instance)
        return found

    @cached_property
    def _kinds(self) -> dict[_SlotKind, _Takable]:
        """All kinds of slots whose hosts have a store."""
        membership, held = self._state.membership, {instance.worker_id for instance in self._kept}
        packs = defaultdict[str, set[str]](set)  # that are kept, by host
        for instance in self._kept:
            packs[instance.host_id].add(instance.pack_id)
        rooms: dict[str, int] = {}  # by host
        found: dict[_SlotKind, _Takable] = {}
        for worker in membership.workers.values():
            if (store := membership.store_of(worker.host_id)) is None:
                continue
            kind = _SlotKind(worker.num_devices, worker.playable_roles, worker.kv_pool_bytes)
            takable = found.setdefault(kind, _Takable(set()))
            if worker.worker_id in held or worker.host_id in takable.host_ids:
                continue
            if (room_bytes := rooms.get(worker.host_id)) is None:
                room_bytes = rooms[worker.host_id] = _room_bytes(store, packs.get(worker.host_id, set()))
            takable.host_ids.add(worker.host_id)
            takable.room_bytes = max(takable.room_bytes, room_bytes)
        return found


def _room_bytes(store: StoreStatus, kept_packs: set[str]) -> int:
    """For another pack, without those that are not kept."""
    copies = (store.copies[pack_id] for pack_id in kept_packs if pack_id in store.copies)
    return store.arena_target_bytes - sum(copy.pack_bytes for copy in copies if copy.num_pins)


def _covers(roles: Iterable[Roles]) -> bool:
    """Whether both roles are among them."""
    played: set[Role] = set()
    for one in roles:
        played |= one
        if played >= BOTH:
            return True
    return False
