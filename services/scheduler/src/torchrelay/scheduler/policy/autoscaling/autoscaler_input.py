"""The autoscaler's input, and the actions it may decide on."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torchrelay.scheduler.policy.autoscaling.slot_assignment import SlotAssignment
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

    @property
    def slot_wait_s(self) -> float:
        """How long it has waited since it had a slot: whose turn has just ended is last, however old its queue."""
        return min(self.oldest_wait_s, self.slotless_s)


@dataclass(frozen=True)
class InstanceLoad:
    """An instance and its load."""

    instance: Instance
    num_open: int  # attempts placed there
    num_reported: int  # running and waiting, as the worker counts
    last_active: float = 0.0  # when an attempt was last placed there, or released
    reload_s: float = 0.0  # to have it back after an eviction: its weights stay in host memory
    tenants: frozenset[str] = frozenset()  # whose models it serves: identical uploads share an instance

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
    occupied: Container[str]  # workers that have one

    @classmethod
    def listed(cls, loads: Sequence[InstanceLoad]) -> Loads:
        def of_version(version_id: str) -> Sequence[InstanceLoad]:
            return [load for load in loads if load.instance.version_id == version_id]

        return cls(of_version, lambda: loads, frozenset(load.instance.worker_id for load in loads))


@dataclass(frozen=True)
class AutoscalerInput:
    """``demands``: of the models to decide on; all others keep what they have, but for slots that they can spare."""

    now: float
    demands: Sequence[Demand]
    instance_loads: Loads
    workers: Mapping[str, WorkerStatus]
    stores: Mapping[str, StoreStatus]  # by host
    idle_timeouts_s: Mapping[str, float]  # by version; absent: the default
    free_workers: Mapping[str, WorkerStatus]  # those that say that their slot is free
    version_ids: Sequence[str] = ()  # of models to look at that may have no demand, as they are not known
    waited_for: frozenset[str] = frozenset()  # versions that requests wait for
    suspects: frozenset[str] = frozenset()  # workers on which nothing is placed

    @cached_property
    def loads(self) -> Sequence[InstanceLoad]:
        return self.instance_loads.of_all()

    @cached_property
    def staying(self) -> Mapping[str, Sequence[InstanceLoad]]:
        """What is not on its way out, by version."""
        found = defaultdict[str, list[InstanceLoad]](list)
        for load in self.loads:
            if load.instance.staying:
                found[load.instance.version_id].append(load)
        return found

    @property
    def staying_of_some(self) -> Mapping[str, Sequence[InstanceLoad]]:
        """``staying`` of the models to decide on, and of ``version_ids``."""
        version_ids = dict.fromkeys((*(demand.model.version_id for demand in self.demands), *self.version_ids))
        found = {version_id: self._staying_of(version_id) for version_id in version_ids}
        return {version_id: loads for version_id, loads in found.items() if loads}

    @property
    def has_all_waiting(self) -> bool:
        """Whether it has the demand of every model that requests wait for."""
        return self.waited_for <= {demand.model.version_id for demand in self.demands}

    def of(self, model: Model) -> Sequence[InstanceLoad]:
        return self._staying_of(model.version_id)

    def _staying_of(self, version_id: str) -> Sequence[InstanceLoad]:
        return [load for load in self.instance_loads.of_version(version_id) if load.instance.staying]

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


Action = Wake | SetRoles | Drain


def cover_both_roles(instances: Iterable[Instance]) -> bool:
    """Whether together they play both roles."""
    return frozenset(role for instance in instances for role in instance.target_roles) >= BOTH
