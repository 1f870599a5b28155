"""Drains of slots for other models, with reasons that tell tenants nothing of each other."""

from __future__ import annotations

from torchrelay.common.quantities import format_duration
from torchrelay.scheduler.policy.autoscaling.autoscaler_input import AutoscalerInput, Demand, Drain, InstanceLoad
from torchrelay.scheduler.policy.autoscaling.eviction.exchange import Exchange
from torchrelay.scheduler.policy.cluster.version_aliases import tenant_of
from torchrelay.scheduler.policy.reasons import Figures, Reason
from torchrelay.scheduler.policy.types import Model


def eviction_of(
    victim: InstanceLoad,
    why: str,
    demand: Demand,
    exchange: Exchange,
    autoscaler_input: AutoscalerInput,
    overdue_tenant: str = "",
) -> Drain:
    idle_s, reload_s = autoscaler_input.now - victim.unused_since, victim.reload_s
    count = "" if len(victim.tenants) > 1 else f" ({exchange.num_lost:.1f} late requests)"
    lost = f"to load it again takes {format_duration(reload_s)}{count}"
    figures = {"idle_s": idle_s, "reload_s": reload_s, **exchange.figures}
    taker = "" if exchange.pays else overdue_tenant
    return drain_of(victim, "evict", f"idle for {format_duration(idle_s)}, {why}; {lost}", demand.model, figures, taker)


def drain_of(
    victim: InstanceLoad,
    cause: str,
    text: str,
    waiting: Model,
    figures: Figures | None = None,
    overdue_tenant: str = "",
) -> Drain:
    """The drain of ``victim``. ``text`` names the waiting model only if the victim's tenants may know it."""
    name = waiting.name if is_of_tenant(victim, waiting.name) else "a model of another tenant"
    reason = Reason(cause, text.format(name), figures or {})
    return Drain(victim.instance.instance_id, reason, overdue_tenant)


def cost_text(victim: InstanceLoad, exchange: Exchange) -> str:
    """The end of a reason for the model that loses the slot. Tenants that share it see no count of each other."""
    return "" if len(victim.tenants) > 1 else f"; without it {exchange.num_lost:.1f} requests of this model are late"


def is_of_tenant(load: InstanceLoad, model: str) -> bool:
    """Whether only the tenant of ``model`` uses the instance, so that each may be named to the other."""
    return load.tenants == {tenant_of(model)}
