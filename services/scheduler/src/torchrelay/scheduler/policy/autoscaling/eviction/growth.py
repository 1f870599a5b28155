"""Growth into the slots of idle models."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchrelay.scheduler.policy.autoscaling.autoscaler_input import (
    AutoscalerInput,
    Demand,
    Drain,
    InstanceLoad,
    cover_both_roles,
)
from torchrelay.scheduler.policy.autoscaling.eviction.drains import eviction_of, is_of_tenant
from torchrelay.scheduler.policy.autoscaling.eviction.exchange import Exchange, away_s, exchange_of
from torchrelay.scheduler.policy.autoscaling.eviction.slot_choice import enough_of
from torchrelay.scheduler.policy.autoscaling.eviction.slot_claims import SlotClaims
from torchrelay.scheduler.policy.autoscaling.sizing import sizings_of
from torchrelay.scheduler.policy.types import Role


@dataclass(frozen=True)
class Gain:
    """A model's gain by one more instance: ``num_saved`` late requests if the instance is held for ``held_s``."""

    num_saved: float
    held_s: float
    text: str

    @property
    def is_due(self) -> bool:
        """Whether the instance is due whatever another model loses, for a minimum."""
        return math.isinf(self.num_saved)


def evict_to_grow(
    demand: Demand,
    missing: Counter[Role],
    gains: Iterable[Gain],
    autoscaler_input: AutoscalerInput,
    claims: SlotClaims,
) -> list[Drain]:
    """Drains idle instances of other models for a model whose queue is too long: instances with fewer requests to lose
    than the model saves while it holds the slot, and that their models would not reclaim. ``gains``: of the first
    missing instance, of the second, and so on.
    """
    drains: list[Drain] = []
    for gain in gains:
        if not missing:
            break
        rest = claims.claim(demand, frozenset(missing))
        missing = +(missing - Counter(frozenset(missing)))
        idle = [
            load
            for load in claims.idle_loads
            if load.instance.version_id != demand.model.version_id
            and load.reload_s <= autoscaler_input.now - load.unused_since
            and _growth_exchange(load, demand, gain, autoscaler_input, claims) is not None
        ]
        for load in enough_of(idle, demand, rest, claims) if rest else []:
            exchange = _growth_exchange(load, demand, gain, autoscaler_input, claims)
            if exchange is not None:  # the drain before may have left this as its model's last instance
                is_shown = gain.is_due or is_of_tenant(load, demand.model.name)  # a minimum counts no requests
                text = gain.text if is_shown else "needs more instances"
                drains.append(eviction_of(load, f"and {{}} {text}", demand, exchange, autoscaler_input))
                claims.add(drains[-1:])
    return drains


def _growth_exchange(
    load: InstanceLoad, demand: Demand, gain: Gain, autoscaler_input: AutoscalerInput, claims: SlotClaims
) -> Exchange | None:
    """The exchange for growth; None if it does not pay or the slot's model would reclaim the slot: because it is the
    model's only slot and a request is expected within a time slice, or because the instance saves its model more than
    half of the gain.
    """
    exchange = exchange_of(load, demand, claims, gain.held_s)._replace(num_gained=gain.num_saved)
    if gain.is_due or not exchange.pays:
        return exchange if exchange.pays else None
    others = claims.others(load)
    if cover_both_roles(other.instance for other in others):
        is_wanted_back = 2 * _num_late_without(load, others, autoscaler_input) > gain.num_saved
    else:
        is_wanted_back = load.arrivals_per_s * (away_s(load, demand, claims) + claims.config.time_slice_s) >= 1
    return None if is_wanted_back else exchange


def _num_late_without(load: InstanceLoad, others: Sequence[InstanceLoad], autoscaler_input: AutoscalerInput) -> float:
    """Late requests that the instance saves its model, if ``others`` play both roles beside it."""
    demand = autoscaler_input.cluster_load.demand_of(load.instance.version_id)
    if demand is None:
        return 0.0
    without = Counter(role for other in others for role in other.instance.target_roles)
    sizings = zip(
        sizings_of(demand, without + Counter(load.instance.target_roles)), sizings_of(demand, without), strict=True
    )
    return max((having.num_lost for having, left in sizings if left.number < having.number), default=0.0)
