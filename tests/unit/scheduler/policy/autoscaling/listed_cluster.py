"""A cluster given as lists, as the autoscaler's input."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from torchrelay.scheduler.policy.autoscaling.autoscaler_input import ClusterLoad, Demand, InstanceLoad
from torchrelay.scheduler.policy.core import Instance, StoreStatus


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

    def unused(self) -> Sequence[InstanceLoad]:
        return [load for load in self.loads if not load.num_open]

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
