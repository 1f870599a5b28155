"""The autoscaler's input, and the actions it may decide on."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

from torchrelay.scheduler.policy.autoscaling.decode_demand import DecodeDemand
from torchrelay.scheduler.policy.autoscaling.lateness import Fluid
from torchrelay.scheduler.policy.autoscaling.least_losses import LeastLosses
from torchrelay.scheduler.policy.autoscaling.minimums import Minimum, reserved_instances
from torchrelay.scheduler.policy.autoscaling.slot_assignment import SlotAssignment
from torchrelay.scheduler.policy.autoscaling.usage import WINDOW_S
from torchrelay.scheduler.policy.cluster.free_workers import FreeWorkers
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.cluster.storage_tiers import Tier
from torchrelay.scheduler.policy.cluster.version_aliases import tenant_of
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.types import (
    BOTH,
    DECODES,
    InstancePhase,
    Model,
    Role,
    Roles,
    StoreStatus,
    WorkerStatus,
)

FIRST_SLOT = "first_slot"  # cause of a drain: a tenant without a slot takes it from a tenant with several


@dataclass(frozen=True)
class Demand:
    """Current demand for one model version."""

    model: Model
    num_waiting: int
    num_cold: int  # placed on instances that are still loading
    oldest_wait_s: float
    since_slot_lost_s: float = math.inf  # infinite: it lost none since its oldest request came
    backlog_s: float = 0.0  # queued prompts, in seconds of one instance; 0 without a measured rate
    not_before: float = 0.0  # no load before this time, because a load failed
    avoid: frozenset[str] = frozenset()  # workers to use only if there is no other
    most_kv_bytes: int = 0  # largest KV of a waiting request; 0: all present pools hold all of them
    least_kv_bytes: int = 0
    by_tenant: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # (num_waiting, num_cold), if several
    arrivals_per_s: float = 0.0  # recent rate
    num_late_before: int = 0  # recent late requests whose instances were loaded when they came
    load: float = 0.0  # seconds of prompts that arrive per second
    target_s: float = 2.0  # for the first token
    late_s: float = 60.0  # cost of a late request, in seconds of its slot
    spare_s: float = 60.0  # how long to keep an instance that the others could replace
    is_deleted: bool = False  # no longer callable
    forecast: tuple[float, float] = (math.inf, math.inf)  # begin and end of the next expected use; see ``usage``
    last_full_at: float = 0.0  # when it last needed all its instances
    load_s: Mapping[Tier, float] = field(default_factory=dict)
    decode: DecodeDemand | None = None  # if roles are sized apart; the other fields then describe prefill
    answers: DecodeDemand | None = None  # sizes instances that play both roles, beside prompts

    @property
    def request_s(self) -> float:
        """Mean work of a request, in seconds of an instance."""
        if self.arrivals_per_s and self.load:
            return self.load / self.arrivals_per_s
        return self.backlog_s / max(self.num_waiting, 1)

    @property
    def slack_s(self) -> float:
        """How long a request may wait: its target without its own prompt."""
        return max(self.target_s - self.request_s, self.target_s / 4)

    @property
    def fluid(self) -> Fluid:
        """If roles are sized apart, their savings are compared, so each is counted for as long as that of answers."""
        known_s = WINDOW_S if self.decode is None else self.decode.known_s
        return Fluid(self.backlog_s, self.load, self.request_s, self.slack_s, self.late_s, known_s=known_s)

    def is_expected(self, now: float) -> bool:
        """Whether the model should be loaded for the next expected request."""
        return self.forecast[0] <= now <= self.forecast[1]

    @property
    def slot_wait_s(self) -> float:
        """Time that the model has waited since it last had a slot, so that a model whose time slice has just ended is
        last, however old its queue.
        """
        return min(self.oldest_wait_s, self.since_slot_lost_s)

    @property
    def waiting_tenants(self) -> Sequence[str]:
        if not self.by_tenant:
            return [tenant_of(self.model.name)]
        return [tenant for tenant, (num_waiting, _) in self.by_tenant.items() if num_waiting]

    def slotless_tenant(self, num_slots_of: Counter[str]) -> str:
        """A tenant that waits for the model and has no slot; empty if each has a slot."""
        return next((tenant for tenant in self.waiting_tenants if not num_slots_of[tenant]), "")


class InstanceLoad(NamedTuple):
    """An instance and its load."""

    instance: Instance
    num_open: int  # attempts placed on it
    num_reported: int  # running and waiting requests, as its worker counts
    last_active: float = 0.0  # when an attempt was last placed or released
    reload_s: float = 0.0  # time to load it again after an eviction, from host memory
    tenants: frozenset[str] = frozenset()  # tenants of its models: identical uploads share an instance
    arrivals_per_s: float = 0.0  # of its version: the greater of the recent rate and the long-run mean
    target_s: float = 2.0  # of its version's requests, for the first token

    @property
    def busy(self) -> bool:
        return self.num_open > 0 or self.num_reported > 0

    @property
    def unused_since(self) -> float:
        """The later of the last use and the end of the load, so that a long load does not count as idle time."""
        ready_at = self.instance.since if self.instance.phase is InstancePhase.READY else 0.0
        return max(self.last_active, ready_at)

    def is_idle_since(self, when: float) -> bool:
        """Whether the worker has accepted the instance and it was not used after ``when``."""
        return self.instance.accepted and not self.busy and self.unused_since <= when


class ClusterLoad(ABC):
    """The load of all instances and versions, computed when asked for: most decisions need only a small part."""

    @property
    @abstractmethod
    def occupied_workers(self) -> Container[str]:
        """Workers that have an instance."""

    @property
    @abstractmethod
    def least_losses(self) -> LeastLosses:
        """The least that each version that has instances loses with a slot."""

    @abstractmethod
    def load(self, instance_id: str) -> InstanceLoad: ...

    @abstractmethod
    def of_version(self, version_id: str) -> Sequence[InstanceLoad]: ...

    @abstractmethod
    def of_all(self) -> Sequence[InstanceLoad]:
        """All instances, oldest first."""

    @abstractmethod
    def on_host(self, host_id: str) -> Sequence[Instance]: ...

    @abstractmethod
    def draining(self) -> Sequence[Instance]: ...

    @abstractmethod
    def unused(self) -> Iterable[Instance]:
        """Instances that no request uses, longest unused first."""

    @abstractmethod
    def slots_by_tenant(self) -> Counter[str]:
        """Number of slots by tenant, without those that were taken from it for a tenant without a slot."""

    @abstractmethod
    def drain_s(self, instance: Instance) -> float:
        """Predicted time until the running answers of the instance end."""

    @abstractmethod
    def demand_of(self, version_id: str) -> Demand | None:
        """The demand for any version; None if the version is unknown."""


class HolderIndex(Protocol):
    """Index of the stores that have each pack."""

    def holders(self, pack_id: str) -> Iterable[StoreStatus]:
        """Stores with a copy of the pack in RAM, whole or not."""

    def disk_holders(self, pack_id: str) -> Iterable[StoreStatus]:
        """Stores that have the pack on disk."""


@dataclass(frozen=True)
class AutoscalerInput:
    """Input of one decision: the values of the moment, and indexes of the state that are read as needed.

    ``demands``: of the models to decide on; all other models keep their slots, except for those that they can spare.
    """

    now: float
    demands: Sequence[Demand]
    cluster_load: ClusterLoad
    workers: Mapping[str, WorkerStatus]
    stores: Mapping[str, StoreStatus]  # by host
    keep_s: Mapping[str, float]  # by version: how long to keep an unused slot; absent: the default
    free_workers: FreeWorkers  # workers that report a free slot
    holder_index: HolderIndex
    version_ids: Sequence[str] = ()  # versions to evaluate that may be unknown, and so have no demand
    waited_for: frozenset[str] = frozenset()  # versions that requests wait for
    suspects: frozenset[str] = frozenset()  # workers on which nothing is placed
    minimums: Mapping[str, Minimum] = field(default_factory=dict)  # by version: minimums in force
    overdue_slots_at: Mapping[str, float] = field(default_factory=dict)  # by tenant: the last ``Drain.overdue_tenant``

    @cached_property
    def loads(self) -> Sequence[InstanceLoad]:
        return self.cluster_load.of_all()

    @cached_property
    def staying(self) -> Mapping[str, Sequence[InstanceLoad]]:
        """Instances that are not draining, by version."""
        by_version = defaultdict[str, list[InstanceLoad]](list)
        for load in self.loads:
            if load.instance.staying:
                by_version[load.instance.version_id].append(load)
        return by_version

    @cached_property
    def num_slots_of(self) -> Counter[str]:
        return self.cluster_load.slots_by_tenant()

    @cached_property
    def reserved(self) -> frozenset[str]:
        """Instances that stay without demand, for a minimum."""

        def of_version(version_id: str) -> list[Instance]:
            return [load.instance for load in self.cluster_load.of_version(version_id)]

        return reserved_instances(self.minimums, of_version)

    @cached_property
    def idle(self) -> Sequence[Instance]:
        """Instances that no request uses or waits for, longest idle first."""
        return [
            instance
            for instance in self.cluster_load.unused()
            if instance.staying
            and instance.accepted
            and instance.instance_id not in self.reserved
            and instance.version_id not in self.waited_for
        ]

    @property
    def staying_of_some(self) -> Mapping[str, Sequence[InstanceLoad]]:
        """The part of ``staying`` for the models to decide on and ``version_ids``."""
        version_ids = dict.fromkeys((*(demand.model.version_id for demand in self.demands), *self.version_ids))
        staying = {version_id: self.staying_of(version_id) for version_id in version_ids}
        return {version_id: loads for version_id, loads in staying.items() if loads}

    @property
    def has_all_waiting(self) -> bool:
        """Whether ``demands`` contains every model that requests wait for."""
        return self.waited_for <= {demand.model.version_id for demand in self.demands}

    def of(self, model: Model) -> Sequence[InstanceLoad]:
        return self.staying_of(model.version_id)

    def staying_of(self, version_id: str) -> Sequence[InstanceLoad]:
        staying = self._staying_known.get(version_id)
        if staying is None:
            loads = self.cluster_load.of_version(version_id)
            staying = self._staying_known[version_id] = [load for load in loads if load.instance.staying]
        return staying

    @cached_property
    def _staying_known(self) -> dict[str, Sequence[InstanceLoad]]:
        """Cache of ``staying_of``."""
        return {}

    def missing(self, demand: Demand, kv_bytes: int) -> Roles:
        """Roles that no instance of the model plays, or will play, for a request with ``kv_bytes`` of KV."""
        played: set[Role] = set()
        for load in self.of(demand.model):
            worker = self.workers.get(load.instance.worker_id)
            is_small = worker is not None and worker.kv_pool_bytes < kv_bytes
            played |= load.instance.target_roles - DECODES if is_small else load.instance.target_roles
        return BOTH - played


@dataclass(frozen=True)
class Load:
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
    reason: Reason  # its cause: "idle", "cancel", "evict", "preempt_spare", "time_slice", FIRST_SLOT
    overdue_tenant: str = ""  # tenant that gets the slot though it costs more: overdue, or as its first


Action = Load | SetRoles | Drain


def cover_both_roles(instances: Iterable[Instance]) -> bool:
    """Whether the instances together play both roles."""
    return frozenset(role for instance in instances for role in instance.target_roles) >= BOTH
