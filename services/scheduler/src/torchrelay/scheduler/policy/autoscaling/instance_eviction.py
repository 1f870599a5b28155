"""Frees a slot for a waiting model without a slot: an idle model's slot, a busy model's second slot, or the slot of a
busy model whose time slice ends. A model that serves and needs to grow gets the slots of idle models only.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchrelay.common.quantities import format_duration
from torchrelay.scheduler.policy.autoscaling.autoscaler_input import (
    FIRST_SLOT,
    AutoscalerInput,
    Demand,
    Drain,
    InstanceLoad,
    SetRoles,
    cover_both_roles,
)
from torchrelay.scheduler.policy.autoscaling.price import num_lost
from torchrelay.scheduler.policy.autoscaling.sizing import sizings_of
from torchrelay.scheduler.policy.autoscaling.slot_claims import SlotClaims, fewest
from torchrelay.scheduler.policy.cluster.storage_tiers import Tier
from torchrelay.scheduler.policy.cluster.version_aliases import tenant_of
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.reasons import Figures, Reason
from torchrelay.scheduler.policy.types import BOTH, InstancePhase, Model, Role, Roles


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
    overdue_tenant = _overdue_tenant(demand, claims, config)
    actions: list[SetRoles | Drain] = []
    if tenant:
        actions += _idle_slots(demand, missing, autoscaler_input, claims, config, overdue_tenant) or _first_slot(
            demand, missing, tenant, autoscaler_input, claims, config
        )
    if not actions and (missing := claims.claim(demand, missing)):
        actions += _idle_slots(demand, missing, autoscaler_input, claims, config, overdue_tenant) or _busy_slots(
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
    config: PolicyConfig,
    overdue_tenant: str,
) -> list[Drain]:
    idle = claims.idle_up_to(math.inf if overdue_tenant else demand.num_gained(0.0))
    exchanges = {load.instance.instance_id: exchange_of(load, demand, claims) for load in idle}
    idle = [
        load
        for load in idle
        if (overdue_tenant or exchanges[load.instance.instance_id].pays)
        and not _is_first_slot(load, demand, autoscaler_input.now, claims)
    ]
    idle.sort(key=lambda load: exchanges[load.instance.instance_id].num_lost)
    waited = f"and {{}} has waited {format_duration(demand.oldest_wait_s)} for a slot"
    return [
        _evict(load, waited, demand, exchanges[load.instance.instance_id], autoscaler_input, overdue_tenant)
        for load in _enough_of(idle, demand, missing, claims)
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
    if shared := _preempt_spare(demand, missing, autoscaler_input, claims, config):
        return shared
    if not overdue_tenant and not _any_slice_pays(demand, autoscaler_input, claims, config):
        return []
    return _end_time_slice(demand, missing, autoscaler_input, claims, config, overdue_tenant)


def _first_slot(
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
    return [_drain(victim, FIRST_SLOT, waited + _cost(victim, exchange), demand.model, exchange.figures, tenant)]


def _is_first_slot(load: InstanceLoad, demand: Demand, now: float, claims: SlotClaims) -> bool:
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


def _overdue_tenant(demand: Demand, claims: SlotClaims, config: PolicyConfig) -> str:
    """The tenant that may take a slot for the model, whatever the slot's model loses: if the model has waited longer
    than the limit and its target, the first waiting tenant that has taken no such slot for a time slice. Empty without
    one.
    """
    if demand.slot_wait_s < overdue_s(demand, config):
        return ""
    return next((tenant for tenant in demand.waiting_tenants if tenant not in claims.overdue_tenants), "")


def overdue_s(demand: Demand, config: PolicyConfig) -> float:
    return max(config.longest_wait_s, demand.target_s)


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
            and load.reload_s <= _idle_s(load, autoscaler_input)
            and _growth_exchange(load, demand, gain, autoscaler_input, claims) is not None
        ]
        for load in _enough_of(idle, demand, rest, claims) if rest else []:
            exchange = _growth_exchange(load, demand, gain, autoscaler_input, claims)
            if exchange is not None:  # the drain before may have left this as its model's last instance
                is_shown = gain.is_due or is_of_tenant(load, demand.model.name)  # a minimum counts no requests
                text = gain.text if is_shown else "needs more instances"
                drains.append(_evict(load, f"and {{}} {text}", demand, exchange, autoscaler_input))
                claims.add(drains[-1:])
    return drains


def _away_s(load: InstanceLoad, demand: Demand, claims: SlotClaims) -> float:
    """Shortest time that a model is without its slot: until its answers have ended, the other model has loaded, and it
    has loaded again itself.
    """
    return claims.drain_s(load) + demand.load_s.get(Tier.HOST, 0.0) + load.reload_s


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
    lost = num_lost(load.arrivals_per_s / number, _away_s(load, demand, claims) + held_s, load.target_s)
    return Exchange(lost, demand.num_gained(held_s))


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
        is_wanted_back = load.arrivals_per_s * (_away_s(load, demand, claims) + claims.config.time_slice_s) >= 1
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


def _idle_s(load: InstanceLoad, autoscaler_input: AutoscalerInput) -> float:
    return autoscaler_input.now - load.unused_since


def _enough_of(idle: Sequence[InstanceLoad], demand: Demand, missing: Roles, claims: SlotClaims) -> list[InstanceLoad]:
    slots = {load.instance.instance_id: claims.roles(demand, load.instance.worker_id) for load in idle}
    chosen = _enough(slots, missing)
    return [load for load in idle if load.instance.instance_id in chosen]


def _enough(slots: Mapping[str, Roles], missing: Roles) -> list[str]:
    """The fewest slots that play all ``missing`` roles; none if even all together do not."""
    chosen = fewest(slots, missing)
    return chosen if missing <= frozenset().union(*(slots[key] for key in chosen)) else []


def _preempt_spare(
    demand: Demand,
    missing: Roles,
    autoscaler_input: AutoscalerInput,
    claims: SlotClaims,
    config: PolicyConfig,
) -> list[SetRoles | Drain]:
    """Drains one of the slots of a model with several, if the others cover its roles or one of them can take both, or
    if the model cannot serve with them anyway. A slot that is worth more to its model stays for a time slice, and until
    the other model has waited for a time slice.

    A prefill instance goes first: its work ends soon, and decoding is not disturbed.
    """
    most_lost = math.inf if demand.slot_wait_s >= config.time_slice_s else demand.num_gained(config.time_slice_s)
    best: _SharedSlot | None = None
    losses, now = autoscaler_input.cluster_load.least_losses, autoscaler_input.now
    for version_id in losses.others(now):
        shared = _shared_slot(version_id, demand, missing, autoscaler_input, claims, config)
        best = min(filter(None, (best, shared)), default=None)
    if best is not None and best.cost[:2] < _WHOLE:
        return best.actions
    for least_lost, version_id in losses.whole_up_to(most_lost, now):
        if best is not None and best.cost[:2] == _WHOLE and least_lost > best.cost[2]:
            break
        shared = _shared_slot(version_id, demand, missing, autoscaler_input, claims, config)
        best = min(filter(None, (best, shared)), default=None)
    return best.actions if best is not None else []


_WHOLE = (False, True)  # of an instance that plays both roles, as the others of its model do


class _SharedSlot(NamedTuple):
    """A slot that a model can do without. ``cost``: whether roles change, whether it decodes, its lost requests, its
    open requests; and its id.
    """

    cost: tuple[bool, bool, float, int, str]
    actions: list[SetRoles | Drain]


def _shared_slot(
    version_id: str,
    demand: Demand,
    missing: Roles,
    autoscaler_input: AutoscalerInput,
    claims: SlotClaims,
    config: PolicyConfig,
) -> _SharedSlot | None:
    """The version's slot that costs it least."""
    model, held_since = demand.model, autoscaler_input.now - config.time_slice_s
    if version_id == model.version_id or version_id in claims.versions:
        return None
    waited = f"{{}} has waited {format_duration(demand.oldest_wait_s)} for a slot, and this model can do without one"
    loads = autoscaler_input.staying_of(version_id)
    is_served = cover_both_roles(load.instance for load in loads)
    candidates: list[_SharedSlot] = []
    for victim in loads:
        instance = victim.instance
        if instance.phase is not InstancePhase.READY or instance.instance_id in autoscaler_input.reserved:
            continue
        exchange = exchange_of(victim, demand, claims, config.time_slice_s, is_spared=True)
        is_over = instance.since <= held_since and demand.slot_wait_s >= config.time_slice_s
        if is_served and not is_over and not exchange.pays:
            continue
        if not claims.roles(demand, instance.worker_id, without=[victim]) >= missing:
            continue
        drain = _drain(victim, "preempt_spare", waited + _cost(victim, exchange), model, exchange.figures)
        changes = _role_takeover(loads, victim, autoscaler_input, drain.reason)
        if changes is not None:
            is_decode = instance.plays(Role.DECODE)
            cost = (bool(changes), is_decode, exchange.num_lost, victim.num_open, instance.instance_id)
            candidates.append(_SharedSlot(cost, [*changes, drain]))
    return min(candidates, default=None)


def _any_slice_pays(
    demand: Demand, autoscaler_input: AutoscalerInput, claims: SlotClaims, config: PolicyConfig
) -> bool:
    """Whether any slot that was held for a time slice is worth more to the waiting model than to its own."""
    held_since, spared = autoscaler_input.now - config.time_slice_s, {demand.model.version_id, *claims.versions}
    least_losses = autoscaler_input.cluster_load.least_losses
    return any(
        load.instance.phase is InstancePhase.READY
        and load.instance.since <= held_since
        and exchange_of(load, demand, claims, config.time_slice_s).pays
        for version_id in least_losses.up_to(demand.num_gained(config.time_slice_s), autoscaler_input.now)
        if version_id not in spared
        for load in autoscaler_input.cluster_load.of_version(version_id)
    )


def slice_exchanges(
    demand: Demand, autoscaler_input: AutoscalerInput, claims: SlotClaims, config: PolicyConfig
) -> dict[str, Exchange]:
    """The exchange of each slot that the model could take from another for a time slice, by instance."""
    return {
        load.instance.instance_id: exchange_of(load, demand, claims, config.time_slice_s)
        for load in autoscaler_input.loads
        if load.instance.version_id not in {demand.model.version_id, *claims.versions}
        and load.instance.instance_id not in autoscaler_input.reserved
    }


def _end_time_slice(
    demand: Demand,
    missing: Roles,
    autoscaler_input: AutoscalerInput,
    claims: SlotClaims,
    config: PolicyConfig,
    overdue_tenant: str,
) -> list[SetRoles | Drain]:
    """Ends a time slice when more models are busy than there are slots: drains the slot whose model loses least among
    those that were held for a time slice, if the waiting model gains as much. A model that is overdue takes the slot
    that loses least, whatever that is, and waits for at most a time slice until that slot was held for a time slice. If
    the weights of a pack are in the way, all its slots on one host are drained. Requests of the drained model wait for
    its next time slice.
    """
    model, held_since = demand.model, autoscaler_input.now - config.time_slice_s
    exchanges = slice_exchanges(demand, autoscaler_input, claims, config)

    def is_over(load: InstanceLoad) -> bool:
        return load.instance.phase is InstancePhase.READY and load.instance.since <= held_since

    loads = [load for load in autoscaler_input.loads if load.instance.instance_id in exchanges]
    able = [load for load in loads if is_over(load) and exchanges[load.instance.instance_id].pays]
    victims = _cheapest(able, exchanges, demand, missing, claims)
    if not victims and overdue_tenant:
        may_wait = demand.slot_wait_s < overdue_s(demand, config) + config.time_slice_s
        able = [load for load in loads if is_over(load) or (may_wait and load.instance.staying)]
        victims = _cheapest(able, exchanges, demand, missing, claims)
    if not all(map(is_over, victims)):
        return []  # waits for this slot's time slice to end rather than take a more valuable slot
    waited = (
        f"{{}} has waited {format_duration(demand.oldest_wait_s)}, and no slot can be spared; this one was held for"
    )
    drains: list[SetRoles | Drain] = []
    for load in victims:
        exchange = exchanges[load.instance.instance_id]
        held = format_duration(autoscaler_input.now - load.instance.since)
        taker = "" if exchange.pays else overdue_tenant
        drains.append(
            _drain(load, "time_slice", f"{waited} {held}{_cost(load, exchange)}", model, exchange.figures, taker)
        )
    return drains


def _cheapest(
    able: Sequence[InstanceLoad],
    exchanges: Mapping[str, Exchange],
    demand: Demand,
    missing: Roles,
    claims: SlotClaims,
) -> list[InstanceLoad]:
    """The slots that lose least and suffice for the missing roles; else all slots of a pack on a host, if only together
    they make space for the weights; else none.
    """
    candidates = sorted(
        able,
        key=lambda load: (
            exchanges[load.instance.instance_id].num_lost,
            load.instance.since,
            load.instance.instance_id,
        ),
    )
    alone = {
        load.instance.instance_id: claims.roles(demand, load.instance.worker_id, without=[load]) for load in candidates
    }
    if chosen := _enough(alone, missing):
        return [load for load in candidates if load.instance.instance_id in chosen]
    together = defaultdict[tuple[str, str], list[InstanceLoad]](list)
    for load in candidates:
        together[load.instance.host_id, load.instance.pack_id].append(load)
    for group in together.values():
        slots = {load.instance.instance_id: claims.roles(demand, load.instance.worker_id, group) for load in group}
        if _enough(slots, missing):
            return group
    return []


def _evict(
    victim: InstanceLoad,
    why: str,
    demand: Demand,
    exchange: Exchange,
    autoscaler_input: AutoscalerInput,
    overdue_tenant: str = "",
) -> Drain:
    idle_s, reload_s = _idle_s(victim, autoscaler_input), victim.reload_s
    count = "" if len(victim.tenants) > 1 else f" ({exchange.num_lost:.1f} late requests)"
    lost = f"to load it again takes {format_duration(reload_s)}{count}"
    figures = {"idle_s": idle_s, "reload_s": reload_s, **exchange.figures}
    taker = "" if exchange.pays else overdue_tenant
    return _drain(victim, "evict", f"idle for {format_duration(idle_s)}, {why}; {lost}", demand.model, figures, taker)


def _cost(victim: InstanceLoad, exchange: Exchange) -> str:
    """The end of a reason for the model that loses the slot. Tenants that share it see no count of each other."""
    return "" if len(victim.tenants) > 1 else f"; without it {exchange.num_lost:.1f} requests of this model are late"


def is_of_tenant(load: InstanceLoad, model: str) -> bool:
    """Whether only the tenant of ``model`` uses the instance, so that each may be named to the other."""
    return load.tenants == {tenant_of(model)}


def _drain(
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


def _role_takeover(
    loads: Sequence[InstanceLoad], victim: InstanceLoad, autoscaler_input: AutoscalerInput, reason: Reason
) -> list[SetRoles] | None:
    """Role changes with which a model serves without ``victim``; None if there are none."""
    rest = [load for load in loads if load is not victim]
    if cover_both_roles(load.instance for load in rest) or not cover_both_roles(load.instance for load in loads):
        return []
    for load in rest:
        worker = autoscaler_input.workers.get(load.instance.worker_id)
        ready = load.instance.phase is InstancePhase.READY and load.instance.takes_roles(autoscaler_input.now)
        if ready and worker is not None and worker.playable_roles >= BOTH:
            return [SetRoles(load.instance.instance_id, BOTH, reason)]
    return None
