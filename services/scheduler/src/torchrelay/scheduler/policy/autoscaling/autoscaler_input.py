"""The autoscaler's input, and the actions it may decide on."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torchrelay.scheduler.policy.autoscaling import price
from torchrelay.scheduler.policy.autoscaling.decode_demand import DecodeDemand
from torchrelay.scheduler.policy.autoscaling.minimums import Minimum, reserved_instances
from torchrelay.scheduler.policy.autoscaling.slot_assignment import SlotAssignment
from torchrelay.scheduler.policy.cluster.free_workers import FreeWorkers
from torchrelay.scheduler.policy.cluster.storage_tiers import Tier
from torchrelay.scheduler.policy.cluster.version_aliases import tenant_of
from torchrelay.scheduler.policy.core import (
    BOTH,
    DECODES,
    Instance,
    InstancePhase,
    Model,
    Role,
    Roles,
    StoreStatus,
    WorkerStatus,
)
from torchrelay.scheduler.policy.reasons import Reason


@dataclass(frozen=True)
class Demand:
    """Current demand for one model version."""

    model: Model
    num_waiting: int
    num_cold: int  # placed on instances that are still loading
    oldest_wait_s: float
    slotless_s: float = math.inf  # since it lost its last slot; infinite: before anybody who waits came
    backlog_s: float = 0.0  # prompts queued at its instances, in seconds of one instance; 0 without a measured rate
    not_before: float = 0.0  # no load before then: one failed
    avoid: frozenset[str] = frozenset()
    most_kv_bytes: int = 0  # of one that waits; 0: every pool that there is holds each of them
    least_kv_bytes: int = 0
    by_tenant: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # (num_waiting, num_cold), if several
    arrivals_per_s: float = 0.0  # of late
    num_late_before: int = 0  # in as long as a cold start is worth, from instances that were loaded
    load: float = 0.0  # seconds of prompts that come per second
    target_s: float = 2.0  # for the first token
    price_s: float = 60.0  # what a cold start is worth, in seconds of its slot
    keep_s: float = 60.0  # how long it is worth to keep an unused slot
    is_deleted: bool = False  # nobody can call it any more
    forecast: tuple[float, float] = (math.inf, math.inf)  # between these its next request is expected: see ``price``
    crowded_at: float = 0.0  # when it last needed all its instances
    load_s: Mapping[Tier, float] = field(default_factory=dict)
    decode: DecodeDemand | None = None  # where roles are sized apart: all else is of prefill then

    def num_gained(self, held_s: float) -> float:
        """Requests that it serves with a slot that it holds for so long; see ``price``."""
        return price.num_gained(self.arrivals_per_s, self.num_waiting, held_s)

    def num_saved(self, num_instances: int, load_s: float) -> float:
        """Late requests that one more instance saves while it is held; see ``price``."""
        if self.arrivals_per_s and self.load:
            request_s = self.load / self.arrivals_per_s
        else:
            request_s = self.backlog_s / max(self.num_waiting, 1)
        slack_s = max(self.target_s - request_s, self.target_s / 4)  # the rest is its own prompt's
        held_s = self.held_s(num_instances, load_s)
        return price.num_saved(num_instances, self.backlog_s, self.load, request_s, slack_s, load_s, held_s)

    def least_saved(self, num_instances: int, load_s: float) -> float:
        """The cost of one more instance, in late requests."""
        return price.least_saved(load_s, self.held_s(num_instances, load_s), self.price_s)

    def held_s(self, num_instances: int, load_s: float) -> float:
        return price.held_s(num_instances, self.backlog_s, load_s, self.price_s)

    def is_expected(self, now: float) -> bool:
        """Whether it should be loaded though nobody asks."""
        return self.forecast[0] <= now <= self.forecast[1]

    @property
    def slot_wait_s(self) -> float:
        """How long it has waited since it had a slot: whose turn has just ended is last, however old its queue."""
        return min(self.oldest_wait_s, self.slotless_s)

    @property
    def waiting_tenants(self) -> Sequence[str]:
        if not self.by_tenant:
            return [tenant_of(self.model.name)]
        return [tenant for tenant, (num_waiting, _) in self.by_tenant.items() if num_waiting]


class InstanceLoad(NamedTuple):
    """An instance and its load."""

    instance: Instance
    num_open: int  # attempts placed there
    num_reported: int  # running and waiting, as the worker counts
    last_active: float = 0.0  # when an attempt was last placed there, or released
    reload_s: float = 0.0  # to have it back after an eviction: its weights stay in host memory
    tenants: frozenset[str] = frozenset()  # whose models it serves: identical uploads share an instance
    arrivals_per_s: float = 0.0  # of its version, of late or in the long run: the greater
    target_s: float = 2.0  # of its version's requests, for the first token
    predict_drain_s: Callable[[], float] = lambda: 0.0

    @property
    def drain_s(self) -> float:
        """Until its answers have ended."""
        return self.predict_drain_s()

    @property
    def busy(self) -> bool:
        return self.num_open > 0 or self.num_reported > 0

    @property
    def unused_since(self) -> float:
        """The last use, or the end of its load: a long load is no idleness."""
        ready_at = self.instance.since if self.instance.phase is InstancePhase.READY else 0.0
        return max(self.last_active, ready_at)

    def is_idle_since(self, when: float) -> bool:
        """Whether its worker has accepted it and it was not used after ``when``."""
        return self.instance.accepted and not self.busy and self.unused_since <= when


@dataclass(frozen=True)
class Loads:
    """The instances and their load: of one version quickly, of all where that is needed."""

    of_version: Callable[[str], Sequence[InstanceLoad]]
    of_all: Callable[[], Sequence[InstanceLoad]]
    unused: Callable[[], Sequence[InstanceLoad]]  # without open attempts
    occupied: Container[str]  # workers that have one

    @classmethod
    def listed(cls, loads: Sequence[InstanceLoad]) -> Loads:
        def of_version(version_id: str) -> Sequence[InstanceLoad]:
            return [load for load in loads if load.instance.version_id == version_id]

        def unused() -> Sequence[InstanceLoad]:
            return [load for load in loads if not load.num_open]

        return cls(of_version, lambda: loads, unused, frozenset(load.instance.worker_id for load in loads))


@dataclass(frozen=True)
class AutoscalerInput:
    """``demands``: of the models to decide on; all others keep what they have, but for slots that they can spare."""

    now: float
    demands: Sequence[Demand]
    instance_loads: Loads
    workers: Mapping[str, WorkerStatus]
    stores: Mapping[str, StoreStatus]  # by host
    prices_s: Mapping[str, float]  # by version: what a cold start is worth, in seconds of a slot; absent: the default
    free_workers: FreeWorkers  # those that say that their slot is free
    version_ids: Sequence[str] = ()  # of models to look at that may have no demand, as they are not known
    waited_for: frozenset[str] = frozenset()  # versions that requests wait for
    suspects: frozenset[str] = frozenset()  # workers on which nothing is placed
    minimums: Mapping[str, Minimum] = field(default_factory=dict)  # by version: of those that have one now
    holders_of: Callable[[str], Iterable[StoreStatus]] | None = None  # by pack; absent: those of ``stores``
    disk_holders_of: Callable[[str], Iterable[StoreStatus]] | None = None  # the same of those that have it on disk
    overdue_slots_at: Mapping[str, float] = field(default_factory=dict)  # by tenant: the last ``Drain.overdue_tenant``
    demand_of: Callable[[str], Demand | None] = lambda version_id: None  # of any version; None: of an unknown one

    @cached_property
    def loads(self) -> Sequence[InstanceLoad]:
        return self.instance_loads.of_all()

    @cached_property
    def staying(self) -> Mapping[str, Sequence[InstanceLoad]]:
        """Instances that are not leaving, by version."""
        by_version = defaultdict[str, list[InstanceLoad]](list)
        for load in self.loads:
            if load.instance.staying:
                by_version[load.instance.version_id].append(load)
        return by_version

    @cached_property
    def reserved(self) -> frozenset[str]:
        """Instances that stay without demand, for a minimum."""

        def of_version(version_id: str) -> list[Instance]:
            return [load.instance for load in self.instance_loads.of_version(version_id)]

        return reserved_instances(self.minimums, of_version)

    @cached_property
    def idle(self) -> Sequence[InstanceLoad]:
        """Instances that no request uses or waits for, longest idle first."""
        idle = [
            load
            for load in self.instance_loads.unused()
            if load.instance.staying
            and load.instance.instance_id not in self.reserved
            and load.instance.version_id not in self.waited_for
            and load.is_idle_since(self.now)
        ]
        return sorted(idle, key=lambda load: (load.last_active, load.instance.instance_id))

    @property
    def staying_of_some(self) -> Mapping[str, Sequence[InstanceLoad]]:
        """``staying`` of the models to decide on, and of ``version_ids``."""
        version_ids = dict.fromkeys((*(demand.model.version_id for demand in self.demands), *self.version_ids))
        staying = {version_id: self.staying_of(version_id) for version_id in version_ids}
        return {version_id: loads for version_id, loads in staying.items() if loads}

    @property
    def has_all_waiting(self) -> bool:
        """Whether it has the demand of every model that requests wait for."""
        return self.waited_for <= {demand.model.version_id for demand in self.demands}

    def holders(self, pack_id: str) -> Iterable[StoreStatus]:
        """Stores with a copy of the pack in RAM, whole or not."""
        if self.holders_of is not None:
            return self.holders_of(pack_id)
        return [store for store in self.stores.values() if pack_id in store.copies]

    def disk_holders(self, pack_id: str) -> Iterable[StoreStatus]:
        """Stores that have the pack on disk."""
        if self.disk_holders_of is not None:
            return self.disk_holders_of(pack_id)
        return [store for store in self.stores.values() if pack_id in (store.disk_pack_ids or ())]

    def of(self, model: Model) -> Sequence[InstanceLoad]:
        return self.staying_of(model.version_id)

    def staying_of(self, version_id: str) -> Sequence[InstanceLoad]:
        staying = self._staying_known.get(version_id)
        if staying is None:
            loads = self.instance_loads.of_version(version_id)
            staying = self._staying_known[version_id] = [load for load in loads if load.instance.staying]
        return staying

    @cached_property
    def _staying_known(self) -> dict[str, Sequence[InstanceLoad]]:
        """``staying_of`` each version that was asked for."""
        return {}

    def missing(self, demand: Demand, kv_bytes: int) -> Roles:
        """Roles that none of the model's instances plays, nor was told to, for a request with so much KV."""
        played: set[Role] = set()
        for load in self.of(demand.model):
            worker = self.workers.get(load.instance.worker_id)
            is_small = worker is not None and worker.kv_pool_bytes < kv_bytes
            played |= load.instance.target_roles - DECODES if is_small else load.instance.target_roles
        return BOTH - played


@dataclass(frozen=True)
class Wake:
    model: Model
    assignments: tuple[SlotAssignment, ...]
    reason: Reason


@dataclass(frozen=True)
class SetRoles:
    instance_id: str
    roles: Roles
    reason: Reason


@dataclass(frozen=True)
class Drain:
    instance_id: str
    reason: Reason  # its cause: "idle", "cancel", "evict", "share", "turn"
    overdue_tenant: str = ""  # gets the slot only because its model has waited too long; empty: what waits is worth it


Action = Wake | SetRoles | Drain


def cover_both_roles(instances: Iterable[Instance]) -> bool:
    """Whether together they play both roles."""
    return frozenset(role for instance in instances for role in instance.target_roles) >= BOTH
