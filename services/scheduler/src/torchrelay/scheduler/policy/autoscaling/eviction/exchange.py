"""The worth of a slot for the model that has it against the worth for a waiting model."""

from __future__ import annotations

import math
from typing import NamedTuple

from torchrelay.scheduler.policy.autoscaling.autoscaler_input import Demand, InstanceLoad, cover_both_roles
from torchrelay.scheduler.policy.autoscaling.eviction.slot_claims import SlotClaims
from torchrelay.scheduler.policy.autoscaling.price import num_lost
from torchrelay.scheduler.policy.cluster.storage_tiers import Tier
from torchrelay.scheduler.policy.reasons import Figures


class Exchange(NamedTuple):
    """The exchange of a slot: late requests of its present model without it, and requests that the other model serves
    with it; see ``price``.
    """

    num_lost: float
    num_gained: float

    @property
    def pays(self) -> bool:
        return self.num_lost <= self.num_gained

    @property
    def figures(self) -> Figures:
        """Figures for the reason, without the infinite gain of a minimum."""
        return {"num_lost": self.num_lost} | ({} if math.isinf(self.num_gained) else {"num_gained": self.num_gained})


def exchange_of(
    load: InstanceLoad, demand: Demand, claims: SlotClaims, held_s: float = 0.0, *, is_spared: bool = False
) -> Exchange:
    """The exchange if the other model holds the slot for ``held_s`` once it is loaded. The model's remaining instances
    take their part of its requests, if they play both roles, or will do so (``is_spared``).
    """
    others = claims.others(load)
    number = 1 + len(others) if is_spared or cover_both_roles(other.instance for other in others) else 1
    lost = num_lost(load.arrivals_per_s / number, away_s(load, demand, claims) + held_s, load.target_s)
    return Exchange(lost, demand.num_gained(held_s))


def away_s(load: InstanceLoad, demand: Demand, claims: SlotClaims) -> float:
    """Shortest time that a model is without its slot: until its answers have ended, the other model has loaded, and it
    has loaded again itself.
    """
    return claims.drain_s(load) + demand.load_s.get(Tier.HOST, 0.0) + load.reload_s
