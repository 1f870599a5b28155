"""The first slot of a tenant without any: taken from a tenant with several, and kept for a time slice."""

from __future__ import annotations

from torchrelay.common.quantities import format_duration
from torchrelay.scheduler.policy.autoscaling.autoscaler_input import (
    FIRST_SLOT,
    AutoscalerInput,
    Demand,
    Drain,
    InstanceLoad,
)
from torchrelay.scheduler.policy.autoscaling.eviction.drains import cost_text, drain_of
from torchrelay.scheduler.policy.autoscaling.eviction.exchange import exchange_of
from torchrelay.scheduler.policy.autoscaling.eviction.slot_claims import SlotClaims
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.types import InstancePhase, Roles


def take_first_slot(
    demand: Demand,
    missing: Roles,
    tenant: str,
    autoscaler_input: AutoscalerInput,
    claims: SlotClaims,
    config: PolicyConfig,
) -> list[Drain]:
    """Takes a slot, whatever its model loses and without waiting for its answers, from a tenant with several for a
    tenant without any: once per tenant and time slice. The answers go on in the next slot of their model. A slot that
    drains comes first, then the slot that has been ready for longest.
    """
    is_due = demand.oldest_wait_s >= config.preempt_spare_after_s and autoscaler_input.has_all_waiting
    if not is_due or tenant in claims.overdue_tenants:
        return []
    candidates = [
        load
        for load in autoscaler_input.loads
        if load.tenants
        and all(claims.num_slots_of[other] > 1 for other in load.tenants)
        and load.instance.reason.cause != FIRST_SLOT
        and load.instance.instance_id not in autoscaler_input.reserved
        and load.instance.version_id not in claims.versions
        and claims.roles(demand, load.instance.worker_id, without=[load]) >= missing
    ]
    if not candidates:
        return []
    order = (InstancePhase.DRAINING, InstancePhase.READY, InstancePhase.LOADING)
    victim = min(candidates, key=lambda load: (order.index(load.instance.phase), load.instance.since))
    waited = f"{{}} has waited {format_duration(demand.oldest_wait_s)}, and its tenant has no slot"
    exchange = exchange_of(victim, demand, claims, config.time_slice_s)
    return [drain_of(victim, FIRST_SLOT, waited + cost_text(victim, exchange), demand.model, exchange.figures, tenant)]


def is_young_first_slot(load: InstanceLoad, demand: Demand, now: float, claims: SlotClaims) -> bool:
    """Whether the slot stays for a time slice, although it is idle: it is the only slot of a tenant, and the tenants
    that wait for the other model have other slots. Otherwise, models would swap it between any two requests of that
    tenant.
    """
    num_slots = claims.num_slots_of
    return (
        load.instance.since > now - claims.config.time_slice_s
        and any(num_slots[tenant] == 1 for tenant in load.tenants - set(demand.waiting_tenants))
        and all(num_slots[tenant] > (tenant in load.tenants) for tenant in demand.waiting_tenants)
    )
