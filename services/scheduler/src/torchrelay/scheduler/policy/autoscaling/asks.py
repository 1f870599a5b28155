"""Asks for slots: what a slot costs its model, and when it changes hands.

Of each slot, the row of this table that applies:

    slot                              for a model that lacks a slot                  for growth and minimums
    idle                              if it costs less, or the model is overdue;     if it costs less, and its model
                                      not the young only slot of a tenant            does not need it back soon; a
                                                                                     minimum takes it in any case
    one of several                    after a wait of 1 s, if it costs less; after   never
                                      a time slice of wait and of its own, always
    of a model that cannot serve      after a wait of 1 s                            never
    busy and the last                 after a wait of 1 s and its own time slice,    never
                                      if it costs less or the model is overdue
    of a tenant with several, for a   after a wait of 1 s, whatever it costs, once   never
    tenant without any                per tenant and time slice, answers go on later
    kept by a minimum, suspected      never                                          never

A model loses the slots for one other model per decision. If the weights of a pack are in the way, all its slots on one
host go.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torchrelay.common.quantities import format_duration
from torchrelay.scheduler.policy.autoscaling.actions import FIRST_SLOT, Drain, SetRoles
from torchrelay.scheduler.policy.autoscaling.bids import Bid, Gain, first_overdue, longest_wait_s
from torchrelay.scheduler.policy.autoscaling.ledger import Ledger, fewest
from torchrelay.scheduler.policy.autoscaling.view import View, cover_both_roles
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.cluster.version_aliases import tenant_of
from torchrelay.scheduler.policy.demand.demand import Demand, sizings_of
from torchrelay.scheduler.policy.demand.lateness import displaced
from torchrelay.scheduler.policy.reasons import Figures, Reason
from torchrelay.scheduler.policy.storage_tiers import Tier
from torchrelay.scheduler.policy.types import BOTH, InstancePhase, Model, Role, Roles

EVICT, PREEMPT_SPARE, TIME_SLICE = "evict", "preempt_spare", "time_slice"
_NOT_YET = ""  # the cause of an ask that an overdue model waits for: the time slice of the cheapest slot


class Ask(NamedTuple):
    """The late requests that a slot costs its model if another model has it, and those that it saves that model.

    ``cause``: the row that allows it; ``reload``: the cost of the load back, in late requests.
    """

    instance: Instance
    num_lost: float
    num_gained: float
    cause: str
    reload: float

    @property
    def pays(self) -> bool:
        return self.cost <= self.num_gained

    @property
    def cost(self) -> float:
        return self.num_lost + self.reload

    @property
    def rank(self) -> tuple[bool, bool, float, float, str]:
        """The cheapest first, idle ones before others. A tenant's first slot comes next, as it waits for no answers:
        the slot that was held for longest.
        """
        instance, is_first = self.instance, self.cause == FIRST_SLOT
        order = _FIRST_SLOT_PHASES.index(instance.phase) if is_first else self.cost
        return (self.cause != EVICT, not is_first, order, instance.since, instance.instance_id)

    @property
    def figures(self) -> Figures:
        """Figures for the reason, without the infinite gain of a minimum."""
        return {"num_lost": self.num_lost} | ({} if math.isinf(self.num_gained) else {"num_gained": self.num_gained})


_FIRST_SLOT_PHASES = (InstancePhase.DRAINING, InstancePhase.READY, InstancePhase.LOADING)


def take_slots(demand: Demand, view: View, ledger: Ledger) -> list[SetRoles | Drain]:
    """Drains that free the slots that a waiting model needs beyond those that it can claim: one that plays all roles it
    lacks, else one per role. A tenant without a slot claims a slot with answers last, after the slots that it may take
    without waiting for answers.
    """
    missing = view.missing(demand, demand.most_kv_bytes)
    tenant = demand.slotless_tenant(ledger.num_slots_of)
    for at_once in (True, False) if tenant else (False,):
        missing = ledger.claim(demand, missing, at_once=at_once)
        if not missing:
            return []
        bid = Bid(demand, missing, tenant, first_overdue(demand, view, ledger))
        asks = [
            *_idle_asks(bid, view, ledger),
            *(_first_slots if at_once else _busy_asks)(bid, view, ledger),
        ]
        if chosen := cheapest(asks, bid, ledger):
            actions = [action for ask in chosen for action in _taken(ask, bid, view)]
            ledger.add(actions)
            ledger.versions.add(demand.model.version_id)
            return actions
    return []


def cheapest(asks: Iterable[Ask], bid: Bid, ledger: Ledger) -> list[Ask]:
    """The cheapest asks that suffice for the roles of the bid. An overdue model takes a slot whatever that costs if no
    exchange pays; none while the time slice of that slot goes on.
    """
    ordered = sorted(asks, key=lambda ask: ask.rank)
    by_right = [ask for ask in ordered if ask.cause != _NOT_YET and (ask.pays or ask.cause != TIME_SLICE)]
    for some in (by_right, ordered):
        if chosen := _enough(some, bid, ledger):
            return [] if any(ask.cause == _NOT_YET for ask in chosen) else chosen
    return []


def _idle_asks(bid: Bid, view: View, ledger: Ledger) -> Iterator[Ask]:
    demand = bid.demand
    for instance in ledger.idle:
        is_own = instance.version_id == demand.model.version_id
        if not is_own and not _is_young_first_slot(instance, demand, view, ledger):
            ask = ask_of(instance, bid, view, ledger, 0.0, EVICT)
            if ask.pays or bid.overdue_tenant:
                yield ask


def _first_slots(bid: Bid, view: View, ledger: Ledger) -> Iterator[Ask]:
    """Yields the asks of slots that a tenant without any may take from tenants with several."""
    if not _may_take_busy(bid, view) or bid.tenant in ledger.overdue_tenants:
        return
    for instance in view.instances:
        if _is_of_rich_tenants(instance, view, ledger) and instance.version_id not in ledger.versions:
            yield ask_of(instance, bid, view, ledger, view.config.time_slice_s, FIRST_SLOT)


def _busy_asks(bid: Bid, view: View, ledger: Ledger) -> Iterator[Ask]:
    """Yields the asks of slots that are in use, as far as the table allows them now."""
    if not _may_take_busy(bid, view):
        return
    demand, slice_s = bid.demand, view.config.time_slice_s
    has_waited = demand.slot_wait_s >= slice_s
    most = math.inf if has_waited or bid.overdue_tenant else bid.num_gained(slice_s)
    for version_id in view.least_losses.up_to(most, view.now):
        if version_id == demand.model.version_id or version_id in ledger.versions:
            continue
        instances = view.staying_of(version_id)
        is_served = cover_both_roles(instances)
        for instance in instances:
            if instance.instance_id in view.reserved:
                continue
            is_held = instance.phase is InstancePhase.READY and instance.since <= view.now - slice_s
            if instance.phase is InstancePhase.READY and _stand_ins(instance, instances, view) is not None:
                ask = ask_of(instance, bid, view, ledger, slice_s, PREEMPT_SPARE)
                if ask.pays or not is_served or (is_held and has_waited):
                    yield ask
            ask = ask_of(instance, bid, view, ledger, slice_s, TIME_SLICE)
            if is_held and (ask.pays or bid.overdue_tenant):
                yield ask
            elif bid.overdue_tenant and demand.slot_wait_s < longest_wait_s(demand, view.config) + slice_s:
                yield ask._replace(cause=_NOT_YET)


def _may_take_busy(bid: Bid, view: View) -> bool:
    """Whether the model has waited for long enough, in a decision on all waiting models: otherwise two of these would
    swap slots.
    """
    has_waited = bid.demand.oldest_wait_s >= view.config.preempt_spare_after_s
    return has_waited and view.has_all_waiting


def ask_of(instance: Instance, bid: Bid, view: View, ledger: Ledger, held_s: float, cause: str) -> Ask:
    """The ask of a slot that another model holds for ``held_s`` once it is loaded. Remaining instances that play both
    roles, or will do so, take their part of the requests; the load back counts as well.
    """
    others, demand, use = ledger.others(instance), bid.demand, view.use_of(instance.version_id)
    number = 1 + len(others) if cause == PREEMPT_SPARE or cover_both_roles(others) else 1
    away_s = away_s_of(instance, demand, view)
    lost = displaced(0.0, use.arrivals_per_s / number, use.target_s, away_s + held_s)
    return Ask(instance, lost, bid.num_gained(held_s), cause, view.reload_s(instance) / demand.late_s)


def away_s_of(instance: Instance, demand: Demand, view: View) -> float:
    """Shortest time that a model is without its slot: until its answers have ended, the other model has loaded, and it
    has loaded again itself.
    """
    return view.drain_s(instance) + demand.load_s.get(Tier.HOST, 0.0) + view.reload_s(instance)


def _stand_ins(instance: Instance, instances: Sequence[Instance], view: View) -> list[str] | None:
    """Instances that must take both roles for a model to serve without ``instance``; none if the others play both
    already, or if the model cannot serve anyway. None if no instance can.
    """
    rest = [other for other in instances if other is not instance]
    if cover_both_roles(rest) or not cover_both_roles(instances):
        return []
    for other in rest:
        worker = view.membership.workers.get(other.worker_id)
        is_ready = other.phase is InstancePhase.READY and other.takes_roles(view.now)
        if is_ready and worker is not None and worker.playable_roles >= BOTH:
            return [other.instance_id]
    return None


def _enough(asks: Sequence[Ask], bid: Bid, ledger: Ledger) -> list[Ask]:
    """The first slots that suffice for the roles, idle ones if possible; else all slots of a pack on a host, if only
    together they make space for the weights, at the sum of their costs; else none. A slot that its model can do
    without, or that a tenant takes as its first, must suffice alone.
    """
    idle = {ask.instance.instance_id: ask for ask in asks if ask.cause == EVICT}
    whole = {ask.instance.instance_id: ask for ask in asks if ask.cause in (EVICT, TIME_SLICE, _NOT_YET)}

    def roles(ask: Ask) -> Roles:
        return ledger.roles(bid.demand, ask.instance, [ask.instance])

    if chosen := enough({key: roles(ask) for key, ask in idle.items()}, bid.roles):
        return [idle[key] for key in chosen]
    if alone := next((ask for ask in asks if roles(ask) >= bid.roles), None):
        return [alone]
    if chosen := enough({key: roles(ask) for key, ask in whole.items()}, bid.roles):
        return [whole[key] for key in chosen]
    together = defaultdict[tuple[str, str], list[Ask]](list)
    for ask in whole.values():
        together[ask.instance.host_id, ask.instance.pack_id].append(ask)
    for group in sorted(together.values(), key=lambda group: sum(ask.cost for ask in group)):
        instances, is_paid = [ask.instance for ask in group], sum(ask.cost for ask in group) <= group[0].num_gained
        slots = {instance.instance_id: ledger.roles(bid.demand, instance, instances) for instance in instances}
        if (is_paid or bid.overdue_tenant) and enough(slots, bid.roles):
            return group
    return []


def enough(slots: Mapping[str, Roles], missing: Roles) -> list[str]:
    """The fewest slots that play all ``missing`` roles; none if even all together do not."""
    chosen = fewest(slots, missing)
    return chosen if missing <= frozenset().union(*(slots[key] for key in chosen)) else []


def _is_of_rich_tenants(instance: Instance, view: View, ledger: Ledger) -> bool:
    """Whether each tenant of the slot has another, and none took this as its first."""
    tenants = view.use_of(instance.version_id).tenants
    return (
        bool(tenants)
        and all(ledger.num_slots_of[tenant] > 1 for tenant in tenants)
        and instance.reason.cause != FIRST_SLOT
        and instance.instance_id not in view.reserved
    )


def _is_young_first_slot(instance: Instance, demand: Demand, view: View, ledger: Ledger) -> bool:
    """Whether the slot stays for a time slice, although it is idle: it is the only slot of a tenant, and the tenants
    that wait for the other model have other slots. Otherwise, models would swap it between any two requests of that
    tenant.
    """
    num_slots, tenants = ledger.num_slots_of, view.use_of(instance.version_id).tenants
    return (
        instance.since > view.now - view.config.time_slice_s
        and any(num_slots[tenant] == 1 for tenant in tenants - set(demand.waiting_tenants))
        and all(num_slots[tenant] > (tenant in tenants) for tenant in demand.waiting_tenants)
    )


# Growth


def take_idle_slots(
    demand: Demand, missing: Counter[Role], gains: Iterable[Gain], view: View, ledger: Ledger
) -> list[Drain]:
    """Drains idle instances of other models for growth or a minimum, each by its gain. An instance that was idle for
    less time than its load takes stays.
    """
    drains: list[Drain] = []
    for gain in gains:
        if not missing:
            break
        rest = ledger.claim(demand, frozenset(missing))
        missing = missing - Counter(frozenset(missing))
        able = [
            instance
            for instance in (ledger.idle if rest else ())
            if instance.version_id != demand.model.version_id
            and view.reload_s(instance) <= view.now - instance.unused_since
            and _growth_ask(instance, demand, gain, view, ledger) is not None
        ]
        slots = {instance.instance_id: ledger.roles(demand, instance, [instance]) for instance in able}
        chosen = enough(slots, rest)
        for instance in able:
            if instance.instance_id not in chosen:
                continue
            # The drain before may have left this as its model's last instance.
            if (ask := _growth_ask(instance, demand, gain, view, ledger)) is not None:
                # A minimum counts no requests.
                is_shown = gain.is_due or is_of_tenant(instance, demand.model.name, view)
                why = f"and {{}} {gain.text if is_shown else 'needs more instances'}"
                drains.append(_eviction(ask, demand.model, why, view))
                ledger.add(drains[-1:])
    return drains


def _growth_ask(instance: Instance, demand: Demand, gain: Gain, view: View, ledger: Ledger) -> Ask | None:
    """The ask of an idle slot for growth; None if it does not pay or its model would take the slot back: the last
    instance of a model that expects a request within a time slice, or more than half of the gain of any other.
    """
    others, use = ledger.others(instance), view.use_of(instance.version_id)
    away_s = away_s_of(instance, demand, view)
    if cover_both_roles(others):
        lost = _num_late_without(instance, others, view)
        is_wanted_back = 2 * lost > gain.num_saved
    else:
        lost = displaced(0.0, use.arrivals_per_s, use.target_s, away_s + gain.held_s)
        is_wanted_back = use.arrivals_per_s * (away_s + view.config.time_slice_s) >= 1
    ask = Ask(instance, lost, gain.num_saved, EVICT, view.reload_s(instance) / demand.late_s)
    return ask if gain.is_due or (ask.pays and not is_wanted_back) else None


def _num_late_without(instance: Instance, others: Sequence[Instance], view: View) -> float:
    """Late requests that the instance saves its model, if ``others`` play both roles beside it."""
    demand = view.demand_of(instance.version_id)
    if demand is None:
        return 0.0
    without = Counter(role for other in others for role in other.target_roles)
    sizings = zip(
        sizings_of(demand, without + Counter(instance.target_roles)), sizings_of(demand, without), strict=True
    )
    return max((having.num_lost for having, left in sizings if left.number < having.number), default=0.0)


# Reasons, which tell tenants nothing of each other


def _taken(ask: Ask, bid: Bid, view: View) -> list[SetRoles | Drain]:
    """The drain of a slot, after the role changes with which its model serves without it."""
    instance, demand, now = ask.instance, bid.demand, view.now
    waited = f"{{}} has waited {format_duration(demand.oldest_wait_s)}"
    taker = "" if ask.pays or ask.cause == PREEMPT_SPARE else bid.overdue_tenant
    if ask.cause == EVICT:
        return [_eviction(ask, demand.model, f"and {waited} for a slot", view, taker)]
    held = format_duration(now - instance.since)
    text = {
        PREEMPT_SPARE: f"{waited} for a slot, and this model can do without one",
        TIME_SLICE: f"{waited}, and no slot can be spared; this one was held for {held}",
        FIRST_SLOT: f"{waited}, and its tenant has no slot",
    }[ask.cause]
    if ask.cause == FIRST_SLOT:
        taker = bid.tenant
    # Tenants that share a model see no count of each other.
    is_shared = len(view.use_of(instance.version_id).tenants) > 1
    cost = "" if is_shared else f"; without it {ask.num_lost:.1f} requests of this model are late"
    drain = _drain(ask, demand.model, text + cost, ask.figures, taker, view)
    instances = view.staying_of(instance.version_id)
    stand_ins = _stand_ins(instance, instances, view) if ask.cause == PREEMPT_SPARE else []
    return [*(SetRoles(instance_id, BOTH, drain.reason) for instance_id in stand_ins or ()), drain]


def _eviction(ask: Ask, waiting: Model, why: str, view: View, overdue_tenant: str = "") -> Drain:
    idle_s, reload_s = view.now - ask.instance.unused_since, view.reload_s(ask.instance)
    is_shared = len(view.use_of(ask.instance.version_id).tenants) > 1
    count = "" if is_shared else f" ({ask.num_lost:.1f} late requests)"
    text = f"idle for {format_duration(idle_s)}, {why}; to load it again takes {format_duration(reload_s)}{count}"
    return _drain(ask, waiting, text, {"idle_s": idle_s, "reload_s": reload_s, **ask.figures}, overdue_tenant, view)


def _drain(ask: Ask, waiting: Model, text: str, figures: Figures, overdue_tenant: str, view: View) -> Drain:
    """The drain of a slot. ``text`` names the waiting model only if the slot's tenants may know it."""
    name = waiting.name if is_of_tenant(ask.instance, waiting.name, view) else "a model of another tenant"
    return Drain(ask.instance.instance_id, Reason(ask.cause, text.format(name), figures), overdue_tenant)


def is_of_tenant(instance: Instance, model: str, view: View) -> bool:
    """Whether only the tenant of ``model`` uses the instance, so that each may be named to the other."""
    return view.use_of(instance.version_id).tenants == {tenant_of(model)}
