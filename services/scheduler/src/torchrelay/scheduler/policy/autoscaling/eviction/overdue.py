"""A model that has waited too long: its tenant may take a slot whatever the slot's model loses."""

from __future__ import annotations

from torchrelay.scheduler.policy.autoscaling.autoscaler_input import Demand
from torchrelay.scheduler.policy.autoscaling.eviction.slot_claims import SlotClaims
from torchrelay.scheduler.policy.config import PolicyConfig


def overdue_tenant_of(demand: Demand, claims: SlotClaims, config: PolicyConfig) -> str:
    """The tenant that may take a slot for the model, whatever the slot's model loses: if the model has waited longer
    than the limit and its target, the first waiting tenant that has taken no such slot for a time slice. Empty without
    one.
    """
    if demand.slot_wait_s < overdue_s(demand, config):
        return ""
    return next((tenant for tenant in demand.waiting_tenants if tenant not in claims.overdue_tenants), "")


def overdue_s(demand: Demand, config: PolicyConfig) -> float:
    return max(config.longest_wait_s, demand.target_s)
