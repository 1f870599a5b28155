"""The actions that the autoscaler may decide on."""

from __future__ import annotations

from dataclasses import dataclass

from torchrelay.scheduler.policy.autoscaling.slots import SlotAssignment
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.types import Model, Roles

FIRST_SLOT = "first_slot"  # cause of a drain: a tenant without a slot takes it from a tenant with several


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
