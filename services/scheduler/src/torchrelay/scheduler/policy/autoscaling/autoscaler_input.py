"""The autoscaler's input, and the actions it may decide on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torchrelay.scheduler.policy.autoscaling.slot_assignment import SlotAssignment
from torchrelay.scheduler.policy.core import BOTH, Instance, Model, Roles, StoreStatus, WorkerStatus
from torchrelay.scheduler.policy.reasons import Reason


@dataclass(frozen=True)
class Demand:
    """Current demand for one model version."""

    model: Model
    num_waiting: int
    num_cold: int  # placed on instances that are still loading
    oldest_wait_s: float
    backlog_s: float = 0.0  # prompts queued at its instances, in seconds of one instance; 0 without a measured rate
    not_before: float = 0.0  # no load before then: one failed
    avoid: frozenset[str] = frozenset()
    by_tenant: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # (num_waiting, num_cold), if several


@dataclass(frozen=True)
class InstanceLoad:
    """An instance and its load."""

    instance: Instance
    num_open: int  # attempts placed there
    num_reported: int  # running and waiting, as the worker counts
    tenants: frozenset[str] = frozenset()  # whose models it serves: identical uploads share an instance

    @property
    def busy(self) -> bool:
        return self.num_open > 0 or self.num_reported > 0

    def is_idle_since(self, when: float) -> bool:
        """Whether its worker has accepted it and it was not used after ``when``."""
        return self.instance.accepted and not self.busy and self.instance.last_active <= when


@dataclass(frozen=True)
class AutoscalerInput:
    now: float
    demands: Sequence[Demand]
    loads: Sequence[InstanceLoad]
    workers: Mapping[str, WorkerStatus]  # those that are not suspect
    stores: Mapping[str, StoreStatus]  # by host
    idle_timeouts_s: Mapping[str, float]  # by version; absent: the default

    @cached_property
    def waited_for(self) -> frozenset[str]:
        """Versions that requests wait for."""
        return frozenset(demand.model.version_id for demand in self.demands if demand.num_waiting)

    @cached_property
    def staying(self) -> Mapping[str, Sequence[InstanceLoad]]:
        """What is not on its way out, by version."""
        found = defaultdict[str, list[InstanceLoad]](list)
        for load in self.loads:
            if load.instance.staying:
                found[load.instance.version_id].append(load)
        return found

    def of(self, model: Model) -> Sequence[InstanceLoad]:
        return self.staying.get(model.version_id, ())


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
