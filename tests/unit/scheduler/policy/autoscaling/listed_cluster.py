"""A cluster given as lists, as the autoscaler's input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from torchrelay.scheduler.policy.autoscaling.autoscaler_input import FIRST_SLOT, ClusterLoad, Demand, InstanceLoad
from torchrelay.scheduler.policy.autoscaling.least_losses import LeastLosses
from torchrelay.scheduler.policy.types import Instance, InstancePhase, StoreStatus


@dataclass(frozen=True)
class ListedLoad(ClusterLoad):
    """The load of these instances. ``demands``: by version; a drain takes no time."""

    loads: Sequence[InstanceLoad] = ()
    demands: Mapping[str, Demand] = field(default_factory=dict)

    @property
    def occupied_workers(self) -> Container[str]:
        return {load.instance.worker_id for load in self.loads}

    def of_version(self, version_id: str) -> Sequence[InstanceLoad]:
        return [load for load in self.loads if load.instance.version_id == version_id]

    def of_all(self) -> Sequence[InstanceLoad]:
        return self.loads

    @property
    def least_losses(self) -> LeastLosses:
        """All unknown, so that each exact loss is computed."""
        losses = LeastLosses(away_s=0.0)
        for load in self.loads:
            losses.changed(load.instance.version_id, has_instances=True)
        return losses

    def load(self, instance_id: str) -> InstanceLoad:
        return next(load for load in self.loads if load.instance.instance_id == instance_id)

    def on_host(self, host_id: str) -> Sequence[Instance]:
        return [load.instance for load in self.loads if load.instance.host_id == host_id]

    def draining(self) -> Sequence[Instance]:
        return [load.instance for load in self.loads if load.instance.phase is InstancePhase.DRAINING]

    def unused(self) -> Sequence[Instance]:
        unused = (load for load in self.loads if not load.busy)
        return [
            load.instance for load in sorted(unused, key=lambda load: (load.last_active, load.instance.instance_id))
        ]

    def slots_by_tenant(self) -> Counter[str]:
        return Counter(
            tenant for load in self.loads if load.instance.reason.cause != FIRST_SLOT for tenant in load.tenants
        )

    def drain_s(self, instance: Instance) -> float:
        return 0.0

    def demand_of(self, version_id: str) -> Demand | None:
        return self.demands.get(version_id)


@dataclass(frozen=True)
class ListedStores:
    """The holders of packs among these stores, by host."""

    stores: Mapping[str, StoreStatus]

    def holders(self, pack_id: str) -> list[StoreStatus]:
        return [store for store in self.stores.values() if pack_id in store.copies]

    def disk_holders(self, pack_id: str) -> list[StoreStatus]:
        return [store for store in self.stores.values() if pack_id in (store.disk_pack_ids or ())]
