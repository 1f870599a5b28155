"""Refusal of requests that no slot will serve because minimum instances, which never give up their slots, hold all
that could. If any other slot could serve a request, it only waits for its turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache

from torchrelay.scheduler.policy.autoscaling.minimums import reserved_instances
from torchrelay.scheduler.policy.cluster.free_workers import SlotKind
from torchrelay.scheduler.policy.cluster.version_aliases import tenant_of
from torchrelay.scheduler.policy.effects import RefusalReason
from torchrelay.scheduler.policy.handlers import lifecycle, refusals
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.types import BOTH, Model, Role, SlotClass, WorkerStatus


def refuse_without_slot(state: State, now: float) -> None:
    """Refuses requests whose only suitable slots have been held by minimum instances past the limit."""
    before, state.without_slot_since = state.without_slot_since, {}
    if not state.minimums.in_force or not len(state.queues):
        return
    slots = _Slots(state)
    for version_id in state.queues.versions:
        model, waiting = state.known_model(version_id), state.queues.waiting(version_id)
        amounts = {admission.kv_bytes(model) for admission in waiting}  # a few, however many requests wait
        held = {kv_bytes for kv_bytes in amounts if slots.are_held(model, kv_bytes)}
        for admission in waiting if held else ():
            if admission.kv_bytes(model) not in held:
                continue
            since = state.without_slot_since[admission.key] = before.get(admission.key, now)
            if now - since >= (limit_s := refusals.absence_limit_s(state, admission)):
                message = f"{admission.model} waits for a slot, and all that could serve it are held by the minimum "
                message += f"instances of {_names(set(slots.holders(model)), admission.tenant)}"
                lifecycle.refuse(state, admission, RefusalReason.NO_CAPACITY, message, now, limit_s)


def _names(models: Collection[str], tenant: str) -> str:
    """The models, as far as the tenant may know them."""
    own = sorted(model for model in models if tenant_of(model) == tenant)
    return " and ".join([*own, *(["models of other tenants"] if len(own) < len(models) else [])])


class _Slots:
    """The slots at one moment, by kind, as many versions may wait for them."""

    def __init__(self, state: State) -> None:
        self._instances, self._membership = state.instances, state.membership
        self._reserved = reserved_instances(state.minimums.in_force, state.instances.of_version)
        self._holders = defaultdict[SlotClass, set[tuple[str, str]]](set)  # versions and names of minimum instances
        self._space_bytes: dict[SlotKind, dict[str, int]] = {}  # for packs, on the hosts of all other slots
        space_bytes = cache(self._space_beside_reserved)
        for worker in state.membership.workers.values():
            if (store := state.membership.store_of(worker.host_id)) is None:
                continue
            kind, instance = SlotKind.of(worker), state.instances.on_worker(worker.worker_id)
            by_host = self._space_bytes.setdefault(kind, {})
            if instance is not None and instance.instance_id in self._reserved:
                self._holders[kind.slot_class].add((instance.version_id, instance.model))
            elif store.host_id not in by_host:
                by_host[store.host_id] = space_bytes(store.host_id)

    def _space_beside_reserved(self, host_id: str) -> int:
        """The arena's space for another pack if only the pinned packs of minimum instances stay."""
        store, instances = self._membership.stores_by_host[host_id], self._instances.on_host(host_id)
        packs = {instance.pack_id for instance in instances if instance.instance_id in self._reserved}
        pinned = (copy.pack_bytes for copy in store.copies.values() if copy.num_pins and copy.pack_id in packs)
        return store.arena_target_bytes - sum(pinned)

    def holders(self, model: Model) -> Iterator[str]:
        """Other models whose minimum instances are in slots that the model could use."""
        for slot_class, holders in self._holders.items():
            if model.fits(slot_class):
                yield from (name for version_id, name in holders if version_id != model.version_id)

    def are_held(self, model: Model, kv_bytes: int) -> bool:
        """Whether requests with ``kv_bytes`` of KV could be served, but only with the slots of minimum instances. The
        slots of the model's own instances serve them, whatever space their hosts have.
        """
        fitting = [kind for kind in self._space_bytes if model.fits(kind.slot_class)]
        able = [kind for kind in fitting if self._have_space(self._space_bytes[kind], model)]
        if _play_both(able, kv_bytes) or next(self.holders(model), None) is None:
            return False
        staying = (instance for instance in self._instances.of_version(model.version_id) if instance.staying)
        own = (self._membership.workers.get(instance.worker_id) for instance in staying)
        return _play_both(fitting, kv_bytes) and not _play_both([*able, *filter(None, own)], kv_bytes)

    def _have_space(self, by_host: Mapping[str, int], model: Model) -> bool:
        if any(space_bytes >= model.pack_bytes for space_bytes in by_host.values()):
            return True
        return any(store.host_id in by_host for store in self._membership.holders(model.pack_id))


def _play_both(slots: Iterable[SlotKind | WorkerStatus], kv_bytes: int) -> bool:
    """Whether the slots together play both roles for requests with ``kv_bytes`` of KV."""
    return frozenset[Role]().union(*(slot.roles_for(kv_bytes) for slot in slots)) >= BOTH
