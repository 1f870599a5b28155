"""The ledger of a decision: slots that are being freed, by whom they are claimed, and what each slot could play."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torchrelay.scheduler.policy.autoscaling.actions import FIRST_SLOT, Action, Load, SetRoles
from torchrelay.scheduler.policy.autoscaling.view import View
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.cluster.version_aliases import tenant_of
from torchrelay.scheduler.policy.demand.demand import Demand
from torchrelay.scheduler.policy.types import InstancePhase, Model, Roles


@dataclass
class _HostPacks:
    """The packs of a host's instances. ``held``: by instance that stays; ``leaving``: of idle and leaving instances."""

    held: dict[str, str] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)


class Ledger:
    """The ledger of one decision: each slot that is being freed serves one waiting model, in the order of their claims.
    A drain that overran its time frees nothing, so that no model waits for it, nor does a drain whose worker leaves.
    """

    def __init__(self, view: View, decided: Iterable[Action]) -> None:
        self._view = view
        self._on_host: dict[str, _HostPacks] = {}
        self._fits: dict[tuple[str, str], bool] = {}  # by pack and host
        self._drained: set[str] = set()  # instances that this decision drains
        self.overdue_tenants = {  # tenants that got a slot for an overdue model less than a time slice ago
            tenant for tenant, at in view.overdue_slots_at.items() if at > view.now - view.config.time_slice_s
        }
        self.idle = view.idle
        self._idle_ids = {instance.instance_id for instance in self.idle}
        draining = sorted(view.instances.draining, key=lambda instance: instance.created_at)
        self._unclaimed = {instance.instance_id: instance for instance in draining if self._leaves(instance)}
        self.versions: set[str] = set()  # versions that lose or claim a slot in this decision; they lose no other
        self.add(decided)

    def claim(self, demand: Demand, missing: Roles, *, at_once: bool = False) -> Roles:
        """Reserves for the model a slot that plays all ``missing`` roles, else one for each; with ``at_once``, slots
        that wait for no answer. Returns the rest.
        """
        slots = {
            key: self.roles(demand, instance)
            for key, instance in self._unclaimed.items()
            if not at_once or instance.reason.cause == FIRST_SLOT or not self._view.is_busy(instance)
        }
        chosen = fewest(slots, missing)
        for instance_id in chosen:
            del self._unclaimed[instance_id]
            self.versions.add(demand.model.version_id)
        return missing.difference(*(slots[instance_id] for instance_id in chosen))

    def add(self, actions: Iterable[Action]) -> None:
        """Records actions that were decided for one model; the slots that they free are reserved for it."""
        for action in actions:
            if isinstance(action, Load):
                tenants = self._waiting_tenants.get(action.model.version_id) or [tenant_of(action.model.name)]
                self.num_slots_of.update(dict.fromkeys(tenants, len(action.assignments)))
                continue
            instance = self._view.instances.get(action.instance_id)
            assert instance is not None, "a decision names instances that it was given"
            self.versions.add(instance.version_id)
            if isinstance(action, SetRoles):  # each of the others may be the last that plays a role
                self.idle = [idle for idle in self.idle if idle.version_id != instance.version_id]
            else:
                if action.overdue_tenant:
                    self.overdue_tenants.add(action.overdue_tenant)
                self.idle = [idle for idle in self.idle if idle is not instance]
                self._drained.add(instance.instance_id)
                if action.reason.cause == FIRST_SLOT:
                    self.num_slots_of.subtract(self._view.use_of(instance.version_id).tenants)
                self._on_host.pop(instance.host_id, None)
                self._fits.clear()

    @cached_property
    def _waiting_tenants(self) -> Mapping[str, Sequence[str]]:
        """Tenants that wait for each version."""
        return {demand.model.version_id: demand.waiting_tenants for demand in self._view.demands}

    @cached_property
    def num_slots_of(self) -> Counter[str]:
        """Number of slots by tenant, with those that this decision gives to them, and without those that it takes for
        tenants without a slot.
        """
        return self._view.num_slots_of.copy()

    def _leaves(self, instance: Instance) -> bool:
        """Whether the instance drains, has time left, and its worker stays."""
        if instance.phase is not InstancePhase.DRAINING:
            return False
        worker = self._view.membership.workers.get(instance.worker_id)
        is_kept = worker is not None and not worker.is_leaving
        return instance.since > self._view.now - self._view.config.longest_drain_s and is_kept

    def others(self, instance: Instance) -> list[Instance]:
        """The other instances of the version that stay."""
        left = {instance.instance_id, *self._drained}
        staying = self._view.staying_of(instance.version_id)
        return [other for other in staying if other.instance_id not in left]

    def roles(self, demand: Demand, instance: Instance, without: Sequence[Instance] = ()) -> Roles:
        """Roles that the instance's slot could play for the waiting model once all idle and leaving instances, and
        ``without``, have left it and its host's arena.
        """
        membership, model = self._view.membership, demand.model
        worker = membership.workers.get(instance.worker_id)
        if worker is None or worker.is_leaving or worker.worker_id in membership.suspects:
            return frozenset()
        if not model.fits(worker):
            return frozenset()
        if any(instance.instance_id not in self._idle_ids for instance in without):
            fits = self._has_space(model, worker.host_id, without)
        else:
            key = (model.pack_id, worker.host_id)
            if key not in self._fits:
                self._fits[key] = self._has_space(model, worker.host_id)
            fits = self._fits[key]
        return worker.roles_for(demand.most_kv_bytes) if fits else frozenset()

    def _has_space(self, model: Model, host_id: str, without: Sequence[Instance] = ()) -> bool:
        store = self._view.membership.stores_by_host.get(host_id)
        if store is None:
            return False
        packs = self._packs(host_id)
        gone = {instance.instance_id: instance.pack_id for instance in without}
        held = {pack_id for instance_id, pack_id in packs.held.items() if instance_id not in gone}
        unpinned = packs.leaving.union(gone.values()) - held
        return store.has_space_for(model.pack_id, model.pack_bytes, unpinned)

    def _packs(self, host_id: str) -> _HostPacks:
        packs = self._on_host.get(host_id)
        if packs is None:
            packs = self._on_host[host_id] = _HostPacks()
            for instance in self._view.instances.on_host(host_id):
                instance_id = instance.instance_id
                if instance_id in self._idle_ids or instance_id in self._drained or self._leaves(instance):
                    packs.leaving.add(instance.pack_id)
                else:
                    packs.held[instance_id] = instance.pack_id
        return packs


def fewest(slots: Mapping[str, Roles], missing: Roles) -> list[str]:
    """The first slot that plays all ``missing`` roles, else the first for each role that any plays."""
    whole = next((key for key, roles in slots.items() if roles >= missing), None)
    if whole is not None:
        return [whole]
    chosen: list[str] = []
    for role in sorted(missing):
        chosen += [key for key, roles in slots.items() if role in roles and key not in chosen][:1]
    return chosen
