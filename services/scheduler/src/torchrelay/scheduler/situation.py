"""What scaling looks at and what it may decide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torchrelay.scheduler.core import BOTH, Instance, Model, Roles, Store, Worker
from torchrelay.scheduler.reasons import Reason
from torchrelay.scheduler.slots import Assignment


@dataclass(frozen=True)
class Demand:
    """What one model version is asked for now."""

    model: Model
    num_waiting: int
    num_cold: int  # placed on instances that are still loading
    oldest_wait_s: float
    backlog_s: float = 0.0  # prompts queued at its instances, in seconds of one instance; 0 where no rate is measured
    not_before: float = 0.0  # after a failed load
    avoid: frozenset[str] = frozenset()
    of_tenants: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # both numbers, where several share it


@dataclass(frozen=True)
class Load:
    """An instance and what it has to do."""

    instance: Instance
    num_open: int  # attempts placed there
    num_reported: int  # running and waiting, as the worker counts
    tenants: frozenset[str] = frozenset()  # whose models it serves: identical uploads share an instance

    @property
    def busy(self) -> bool:
        return self.num_open > 0 or self.num_reported > 0

    def is_idle_since(self, when: float) -> bool:
        """Whether the worker has it and nobody has used it after ``when``."""
        return self.instance.accepted and not self.busy and self.instance.last_active <= when


@dataclass(frozen=True)
class Situation:
    now: float
    demands: Sequence[Demand]
    loads: Sequence[Load]
    workers: Mapping[str, Worker]  # all that may be given work
    stores: Mapping[str, Store]  # by host
    idle_timeouts_s: Mapping[str, float]  # by version; absent: the default


@dataclass(frozen=True)
class Wake:
    model: Model
    assignments: tuple[Assignment, ...]
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


def covers(instances: Iterable[Instance]) -> bool:
    """Whether they play both roles between them."""
    return frozenset(role for instance in instances for role in instance.roles_to_be) >= BOTH
