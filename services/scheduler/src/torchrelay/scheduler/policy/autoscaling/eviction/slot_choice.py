"""The fewest slots that play the roles that a model lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchrelay.scheduler.policy.autoscaling.autoscaler_input import Demand, InstanceLoad
from torchrelay.scheduler.policy.autoscaling.eviction.slot_claims import SlotClaims, fewest
from torchrelay.scheduler.policy.types import Roles


def enough_of(idle: Sequence[InstanceLoad], demand: Demand, missing: Roles, claims: SlotClaims) -> list[InstanceLoad]:
    slots = {load.instance.instance_id: claims.roles(demand, load.instance.worker_id) for load in idle}
    chosen = enough(slots, missing)
    return [load for load in idle if load.instance.instance_id in chosen]


def enough(slots: Mapping[str, Roles], missing: Roles) -> list[str]:
    """The fewest slots that play all ``missing`` roles; none if even all together do not."""
    chosen = fewest(slots, missing)
    return chosen if missing <= frozenset().union(*(slots[key] for key in chosen)) else []
