"""Number of slots that each pool should have, and why. A pool is all slots with the same number of devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torchrelay.common.quantities import format_count
from torchrelay.scheduler.policy.autoscaling.autoscaler_input import Demand
from torchrelay.scheduler.policy.autoscaling.sizing import wanted_instances
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.types import ROLES, Role

_MAX_NAMES = 3  # of models, in a reason


@dataclass(frozen=True, slots=True)
class SlotShortage:
    """A model that needs more slots than it holds."""

    model: str
    num_slots: int


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """A pool at one moment. ``num_used``: slots that hold an instance; ``num_idle``: the part of these whose instance
    would be evicted for a waiting model. ``role``: of workers that can play no other; None: of all workers.
    """

    num_devices: int
    num_slots: int = 0
    num_used: int = 0
    num_idle: int = 0
    shortages: Sequence[SlotShortage] = ()
    role: Role | None = None


@dataclass(frozen=True, slots=True)
class PoolTarget:
    """``num_wanted``: the slots that the pool should have."""

    load: PoolLoad
    num_wanted: int
    reason: Reason


def missing_roles(
    demand: Demand, playing: Counter[Role], minimum: int, load_s: float, config: PolicyConfig
) -> Counter[Role]:
    """Instances that the model lacks, by role. ``playing``: its instances per role; ``minimum``: its minimum instances
    per role; ``load_s``: predicted duration of a load into a new slot.
    """
    wanted = Counter(dict.fromkeys(ROLES, int(demand.num_waiting > 0)))
    if all(playing[role] for role in ROLES):
        wanted = wanted_instances(demand, playing, load_s, config)
    return +Counter({role: max(minimum, wanted[role]) - playing[role] for role in ROLES})


def num_missing_slots(demand: Demand, missing: Counter[Role]) -> int:
    """Slots that the model lacks, if each new slot can play both roles."""
    return missing.total() if demand.decode is not None else max(missing.values(), default=0)


def pool_target(load: PoolLoad, config: PolicyConfig) -> PoolTarget:
    """The slots in use, those that models lack beyond the idle ones, and the spare ones, within the limits."""
    num_short = sum(shortage.num_slots for shortage in load.shortages)
    num_new = max(num_short - load.num_idle, 0)
    needed = load.num_used + num_new + config.pool_spare_slots
    most = config.pool_max_slots or needed
    wanted = max(config.pool_min_slots, min(needed, most))
    parts = [f"{load.num_used} in use"]
    if num_new:
        parts.append(f"{num_new} for {_names(load.shortages)}")
    if config.pool_spare_slots:
        parts.append(f"{config.pool_spare_slots} spare")
    text = f"{format_count(needed, 'slot')} needed: {', '.join(parts)}"
    cause = "pool_demand"
    if wanted != needed:
        cause = "pool_min" if wanted > needed else "pool_max"
        limit = "minimum" if wanted > needed else "maximum"
        text += f"; the pool's {limit} is {wanted}"
    figures = {"num_slots": load.num_slots, "num_wanted": wanted, "num_used": load.num_used, "num_short": num_short}
    return PoolTarget(load, wanted, Reason(cause, text, figures))


def _names(shortages: Sequence[SlotShortage]) -> str:
    names = [shortage.model for shortage in shortages]
    shown = ", ".join(names[:_MAX_NAMES])
    return f"{shown} and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else shown
