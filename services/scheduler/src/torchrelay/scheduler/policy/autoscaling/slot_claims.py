"""Claims of waiting models on the slots that are being freed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from torchrelay.scheduler.policy.autoscaling.autoscaler_input import (
    FIRST_SLOT,
    Action,
    AutoscalerInput,
    Demand,
    InstanceLoad,
    SetRoles,
    Wake,
)
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.core import Instance, InstancePhase, Model, Roles


class SlotClaims:
    """The ledger of one decision: each slot that is being freed serves one waiting model, in the order of their claims.
    A drain that overran its time frees nothing, so that no model waits for it, nor does a drain whose worker leaves.
    """

    def __init__(self, autoscaler_input: AutoscalerInput, config: PolicyConfig, decided: Iterable[Action]) -> None:
        self._input = autoscaler_input
        self._loads = {load.instance.instance_id: load for load in autoscaler_input.loads}
        begun_after = autoscaler_input.now - config.longest_drain_s
        self._unclaimed: dict[str, Instance] = {}
        self._held = defaultdict[str, dict[str, str]](dict)  # packs of instances that stay: by host, by instance
        self._leaving = defaultdict[str, set[str]](set)  # packs of instances that are idle or leave, by host
        self._fits: dict[tuple[str, str], bool] = {}  # by pack and host
        self._drained: set[str] = set()  # instances that this decision drains
        self.overdue_tenants = {  # tenants that got a slot for an overdue model less than a turn ago
            tenant
            for tenant, at in autoscaler_input.overdue_slots_at.items()
            if at > autoscaler_input.now - config.turn_s
        }
        self.idle = autoscaler_input.idle
        idle_ids = {load.instance.instance_id for load in self.idle}
        for instance_id, load in self._loads.items():
            instance = load.instance
            worker = autoscaler_input.workers.get(instance.worker_id)
            is_kept = worker is not None and not worker.is_leaving
            leaves = instance.phase is InstancePhase.DRAINING and instance.since > begun_after and is_kept
            if leaves:
                self._unclaimed[instance_id] = instance
            if leaves or instance_id in idle_ids:
                self._leaving[instance.host_id].add(instance.pack_id)
            else:
                self._held[instance.host_id][instance_id] = instance.pack_id
        self.versions: set[str] = set()  # versions that lose or claim a slot in this decision; they lose no other
        self.add(decided)

    def claim(self, demand: Demand, missing: Roles, *, at_once: bool = False) -> Roles:
        """Reserves for the model a slot that plays all ``missing`` roles, else one for each; with ``at_once``, slots
        that wait for no answer. Returns the rest.
        """
        slots = {
            key: self.roles(demand, instance.worker_id)
            for key, instance in self._unclaimed.items()
            if not at_once or instance.reason.cause == FIRST_SLOT or not self._loads[key].busy
        }
        chosen = fewest(slots, missing)
        for instance_id in chosen:
            del self._unclaimed[instance_id]
            self.versions.add(demand.model.version_id)
        return missing.difference(*(slots[instance_id] for instance_id in chosen))

    def add(self, actions: Iterable[Action]) -> None:
        """Records actions that were decided for one model; the slots that they free are reserved for it."""
        for action in actions:
            if isinstance(action, Wake):
                continue
            instance = self._loads[action.instance_id].instance
            self.versions.add(instance.version_id)
            if isinstance(action, SetRoles):  # each of the others may be the last that plays a role
                self.idle = [load for load in self.idle if load.instance.version_id != instance.version_id]
            else:
                if action.overdue_tenant:
                    self.overdue_tenants.add(action.overdue_tenant)
                self.idle = [load for load in self.idle if load.instance is not instance]
                self._drained.add(instance.instance_id)
                self._held[instance.host_id].pop(instance.instance_id, None)
                self._leaving[instance.host_id].add(instance.pack_id)
                self._fits.clear()

    def drain_s(self, load: InstanceLoad) -> float:
        """Predicted time until the instance's answers have ended."""
        return self._input.cluster_load.drain_s(load.instance)

    def others(self, load: InstanceLoad) -> list[InstanceLoad]:
        """The other instances of the version that stay."""
        left = {load.instance.instance_id, *self._drained}
        staying = self._input.staying_of(load.instance.version_id)
        return [other for other in staying if other.instance.instance_id not in left]

    def roles(self, demand: Demand, worker_id: str, without: Sequence[InstanceLoad] = ()) -> Roles:
        """Roles that the worker could play for the waiting model once all idle and leaving instances, and ``without``,
        have left its slot and its host's arena.
        """
        worker, model = self._input.workers.get(worker_id), demand.model
        if worker is None or worker_id in self._input.suspects or worker.num_devices != model.num_devices:
            return frozenset()
        if without:
            fits = self._has_space(model, worker.host_id, without)
        else:
            key = (model.pack_id, worker.host_id)
            if key not in self._fits:
                self._fits[key] = self._has_space(model, worker.host_id)
            fits = self._fits[key]
        return worker.roles_for(demand.most_kv_bytes) if fits else frozenset()

    def _has_space(self, model: Model, host_id: str, without: Sequence[InstanceLoad] = ()) -> bool:
        store = self._input.stores.get(host_id)
        if store is None:
            return False
        gone = {load.instance.instance_id: load.instance.pack_id for load in without}
        held = {pack_id for instance_id, pack_id in self._held[host_id].items() if instance_id not in gone}
        unpinned = self._leaving[host_id].union(gone.values()) - held
        return store.has_space_for(model.pack_id, model.pack_bytes, unpinned)


def fewest(slots: Mapping[str, Roles], missing: Roles) -> list[str]:
    """The first slot that plays all ``missing`` roles, else the first for each role that any plays."""
    whole = next((key for key, roles in slots.items() if roles >= missing), None)
    if whole is not None:
        return [whole]
    chosen: list[str] = []
    for role in sorted(missing):
        chosen += [key for key, roles in slots.items() if role in roles and key not in chosen][:1]
    return chosen
