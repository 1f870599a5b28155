"""Bids for slots: the late requests that a slot saves a model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchrelay.scheduler.policy.autoscaling.ledger import Ledger
from torchrelay.scheduler.policy.autoscaling.view import View
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.demand.demand import Demand
from torchrelay.scheduler.policy.demand.lateness import displaced
from torchrelay.scheduler.policy.storage_tiers import Tier
from torchrelay.scheduler.policy.types import Roles


@dataclass(frozen=True)
class Bid:
    """A model that lacks ``roles``, and what it may take. ``tenant``: without a slot; ``overdue_tenant``: may take a
    slot whatever that costs; both may be empty.
    """

    demand: Demand
    roles: Roles
    tenant: str
    overdue_tenant: str

    def num_gained(self, held_s: float) -> float:
        """Late requests that a slot saves if it is held for ``held_s`` after its load: those that wait, and those that
        come once it is loaded. For an idle slot, which its model may soon take back, those that wait count once.
        """
        demand = self.demand
        if not held_s:
            return float(demand.num_waiting)
        load_s, rate = demand.load_s.get(Tier.HOST, 0.0), demand.arrivals_per_s
        without = displaced(demand.num_waiting, rate, demand.slack_s, held_s + load_s)
        return without - displaced(0.0, rate, demand.slack_s, load_s)


def longest_wait_s(demand: Demand, config: PolicyConfig) -> float:
    """How long a model waits for a slot, at most, before it may take one whatever that costs."""
    return max(config.longest_wait_s, demand.target_s)


def first_overdue(demand: Demand, view: View, ledger: Ledger) -> str:
    """The tenant that may take a slot for the model, whatever that costs: if the model has waited longer than the limit
    and its target, the first waiting tenant that has taken no such slot for a time slice. Empty without such a tenant.
    """
    if demand.slot_wait_s < longest_wait_s(demand, view.config):
        return ""
    return next((tenant for tenant in demand.waiting_tenants if tenant not in ledger.overdue_tenants), "")


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
