"""Frees a slot for a waiting model without a slot: an idle model's slot, a busy model's second slot, or the slot of a
busy model whose time slice ends. A model that serves and needs to grow gets the slots of idle models only.
"""

from __future__ import annotations

import math

from torchrelay.common.quantities import format_duration
from torchrelay.scheduler.policy.autoscaling.autoscaler_input import AutoscalerInput, Demand, Drain, SetRoles
from torchrelay.scheduler.policy.autoscaling.eviction.drains import eviction_of
from torchrelay.scheduler.policy.autoscaling.eviction.exchange import exchange_of
from torchrelay.scheduler.policy.autoscaling.eviction.first_slot import is_young_first_slot, take_first_slot
from torchrelay.scheduler.policy.autoscaling.eviction.overdue import overdue_tenant_of
from torchrelay.scheduler.policy.autoscaling.eviction.slot_choice import enough_of
from torchrelay.scheduler.policy.autoscaling.eviction.slot_claims import SlotClaims
from torchrelay.scheduler.policy.autoscaling.eviction.spare_slot import preempt_spare
from torchrelay.scheduler.policy.autoscaling.eviction.time_slice import any_slice_pays, end_time_slice
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.types import Roles


def evict(
    demand: Demand, autoscaler_input: AutoscalerInput, claims: SlotClaims, config: PolicyConfig
) -> list[SetRoles | Drain]:
    """Drains that free the slots that the model needs beyond those it can claim: one that plays all roles it lacks,
    else one per role.
    """
    missing = autoscaler_input.missing(demand, demand.most_kv_bytes)
    tenant = demand.slotless_tenant(claims.num_slots_of)
    if tenant and not (missing := claims.claim(demand, missing, at_once=True)):
        return []
    overdue_tenant = overdue_tenant_of(demand, claims, config)
    actions: list[SetRoles | Drain] = []
    if tenant:
        actions += _idle_slots(demand, missing, autoscaler_input, claims, overdue_tenant) or take_first_slot(
            demand, missing, tenant, autoscaler_input, claims, config
        )
    if not actions and (missing := claims.claim(demand, missing)):
        actions += _idle_slots(demand, missing, autoscaler_input, claims, overdue_tenant) or _busy_slots(
            demand, missing, autoscaler_input, claims, config, overdue_tenant
        )
    if actions:
        claims.add(actions)
        claims.versions.add(demand.model.version_id)
    return actions


def _idle_slots(
    demand: Demand,
    missing: Roles,
    autoscaler_input: AutoscalerInput,
    claims: SlotClaims,
    overdue_tenant: str,
) -> list[Drain]:
    idle = claims.idle_up_to(math.inf if overdue_tenant else demand.num_gained(0.0))
    exchanges = {load.instance.instance_id: exchange_of(load, demand, claims) for load in idle}
    idle = [
        load
        for load in idle
        if (overdue_tenant or exchanges[load.instance.instance_id].pays)
        and not is_young_first_slot(load, demand, autoscaler_input.now, claims)
    ]
    idle.sort(key=lambda load: exchanges[load.instance.instance_id].num_lost)
    waited = f"and {{}} has waited {format_duration(demand.oldest_wait_s)} for a slot"
    return [
        eviction_of(load, waited, demand, exchanges[load.instance.instance_id], autoscaler_input, overdue_tenant)
        for load in enough_of(idle, demand, missing, claims)
    ]


def _busy_slots(
    demand: Demand,
    missing: Roles,
    autoscaler_input: AutoscalerInput,
    claims: SlotClaims,
    config: PolicyConfig,
    overdue_tenant: str,
) -> list[SetRoles | Drain]:
    # The model that has waited longer comes first; otherwise two waiting models would swap slots.
    if demand.oldest_wait_s < config.preempt_spare_after_s or not autoscaler_input.has_all_waiting:
        return []
    if shared := preempt_spare(demand, missing, autoscaler_input, claims, config):
        return shared
    if not overdue_tenant and not any_slice_pays(demand, autoscaler_input, claims, config):
        return []
    return end_time_slice(demand, missing, autoscaler_input, claims, config, overdue_tenant)
