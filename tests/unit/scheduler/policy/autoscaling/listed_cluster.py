"""A cluster given as lists, as the autoscaler's input: instances and their loads, workers, stores and demands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchrelay.scheduler.policy.autoscaling.autoscaler_input import (
    FIRST_SLOT,
    AutoscalerInput,
    ClusterLoad,
    Demand,
    InstanceLoad,
)
from torchrelay.scheduler.policy.autoscaling.decode_demand import DecodeDemand
from torchrelay.scheduler.policy.autoscaling.least_losses import LeastLosses
from torchrelay.scheduler.policy.cluster.free_workers import FreeWorkers
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.types import (
    BOTH,
    InstancePhase,
    Model,
    Role,
    Roles,
    SlotStatus,
    StoreStatus,
    WorkerStatus,
)

PREFILL, DECODE = frozenset((Role.PREFILL,)), frozenset((Role.DECODE,))
RULES = PolicyConfig()


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


def a_demand(model: Model, num_waiting: int = 1, **changes: object) -> Demand:
    return replace(Demand(model, num_waiting, 0, 0.0), **changes)  # type: ignore[arg-type]


def an_instance(
    model: Model, worker: WorkerStatus, roles: Roles = BOTH, phase: InstancePhase = InstancePhase.READY
) -> Instance:
    return Instance(
        f"i-{worker.worker_id}", model.name, model.version_id, model.pack_id, worker.worker_id, worker.incarnation,
        worker.host_id, roles, phase, 0, 0, accepted_at=1.0,
    )  # fmt: skip


def a_situation(
    demands: list[Demand],
    loads: list[InstanceLoad],
    workers: list[WorkerStatus],
    stores: list[StoreStatus],
    now: float = 100.0,
) -> AutoscalerInput:
    taken = {load.instance.worker_id: load.instance for load in loads}
    seated = [
        replace(worker, slot=SlotStatus(taken[worker.worker_id].phase)) if worker.worker_id in taken else worker
        for worker in workers
    ]
    by_host = {store.host_id: store for store in stores}
    return AutoscalerInput(
        now,
        demands,
        ListedLoad(loads),
        {w.worker_id: w for w in seated},
        by_host,
        keep_s={},
        free_workers=FreeWorkers(w for w in seated if w.slot.phase is InstancePhase.FREE),
        holder_index=ListedStores(by_host),
        waited_for=frozenset(demand.model.version_id for demand in demands if demand.num_waiting),
    )


def crowded_demand(model: Model, num_waiting: int = 40, **changes: object) -> Demand:
    """5 requests a second of 0.1 s each, and 0.5 s to wait for them."""
    crowd = a_demand(model, num_waiting, arrivals_per_s=5.0, load=0.5, target_s=0.6, backlog_s=num_waiting / 10)
    return replace(crowd, **changes)  # type: ignore[arg-type]


def answers(num_answers: int, arrivals_per_s: float, **changes: object) -> DecodeDemand:
    """An instance holds 10 answers of 10 s each: one of them is one second of its work."""
    demand = DecodeDemand(
        num_answers,
        num_held=10,
        num_most=20,
        answer_s=10.0,
        arrivals_per_s=arrivals_per_s,
        target_s=2.0,
        late_s=60.0,
    )
    return replace(demand, **changes)  # type: ignore[arg-type]
