"""Autoscaling: decides which instances to load, drain or give other roles, for the whole cluster at once.

for each model that cannot serve its requests, those of tenants without a slot first, then the longest wait first:
    load it into free slots, or give the missing role to an instance of its own
    else take the cheapest slot of another model, by the table of ``asks.py``
for each model that can serve:
    grow to the number of instances that save most beyond their cost, but not into slots for which others wait
for each minimum, load what is missing; for each expected request, load its model into a free slot
drain what was unused for its keep time, or not needed for as long; cancel loads that no request waits for
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import count, repeat

from torchrelay.common.quantities import format_duration
from torchrelay.scheduler.policy.autoscaling.actions import Action, Drain, Load, SetRoles
from torchrelay.scheduler.policy.autoscaling.asks import Gain, take_idle_slots, take_slots
from torchrelay.scheduler.policy.autoscaling.demand import Demand
from torchrelay.scheduler.policy.autoscaling.ledger import Ledger
from torchrelay.scheduler.policy.autoscaling.role_changes import change_role
from torchrelay.scheduler.policy.autoscaling.sizing import Growth, Sizing, sizings_of, wanted_instances
from torchrelay.scheduler.policy.autoscaling.slots import FreeSlots, SlotAssignment, assign
from torchrelay.scheduler.policy.autoscaling.view import View, cover_both_roles
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.storage_tiers import Tier, tier_of
from torchrelay.scheduler.policy.types import BOTH, ROLES, InstancePhase, Role, Roles

_CANCELLED = Reason("cancel", "no request waits for it any more")


def decide(view: View) -> tuple[Action, ...]:
    """All actions that are due; deciding again after applying them yields none."""
    decision = _Decision(view)
    starving = [demand for demand in decision.lacking() if not decision.load_into_free_slots(demand)]
    for demand in starving:
        decision.take_slot(demand)
    decision.keep_free_for(starving)
    if view.has_all_waiting:
        for demand in decision.demands:
            decision.grow(demand)
        for demand in decision.demands:
            decision.fill_minimum(demand)
            decision.load_expected(demand)
    return (*decision.actions, *_scale_down(view, decision.actions))


class _Decision:
    """The actions so far, with the free slots that they leave and the roles that they grant, by version."""

    def __init__(self, view: View) -> None:
        self.actions: list[Action] = []
        # The longest wait for a slot comes first.
        self.demands = sorted(view.demands, key=lambda demand: -demand.slot_wait_s)
        self._view = view
        self._granted: dict[str, list[Roles]] = {}
        self._free = FreeSlots(view.instances, view.membership)

    @cached_property
    def _ledger(self) -> Ledger:
        return Ledger(self._view, decided=self.actions)

    def lacking(self) -> list[Demand]:
        """Models that lack a role for a waiting request: those of tenants without any slot first."""
        lacking = [
            demand
            for demand in self.demands
            if demand.num_waiting
            and self._view.now >= demand.not_before
            and self._view.missing(demand, demand.most_kv_bytes)
        ]
        if len(lacking) > 1:
            lacking.sort(key=lambda demand: not demand.slotless_tenant(self._view.num_slots_of))
        return lacking

    def load_into_free_slots(self, demand: Demand) -> bool:
        """Gives the model the roles that it lacks, without taking a slot from another; whether it could."""
        started = _scale_from_zero(demand, self._view, self._free)
        self._add(started)
        return bool(started)

    def take_slot(self, demand: Demand) -> None:
        self.actions += take_slots(demand, self._view, self._ledger)

    def keep_free_for(self, demands: Iterable[Demand]) -> None:
        """Leaves the slots that suit these models in part to them: no model grows into these."""
        for demand in demands:
            self._free.take(self._free.of(demand.model, kv_bytes=demand.most_kv_bytes))

    def grow(self, demand: Demand) -> None:
        """Adds instances of a model that serves: by an instance that its other role can spare, then into free slots and
        slots of idle models, and last by an instance that is worth less to its other role.
        """
        growth = _growth(demand, self._view, self._granted_to(demand), self._free)
        if growth is None:
            return
        change = partial(change_role, demand, growth, self._view, self.actions)
        changed = change(most_lost=1.0)  # an instance that the other role can spare serves at once, without a slot
        missing = growth.missing - Counter(role for action in changed for role in action.roles)
        assignments = _assign_growth(demand, growth, missing)
        if assignments:
            self._add([Load(demand.model, assignments, _growth_reason(demand, growth))])
        missing -= Counter(role for assignment in assignments for role in assignment.roles)
        if missing:
            evicted = take_idle_slots(demand, missing, _gains(demand, growth, missing), self._view, self._ledger)
            self.actions += evicted
            if not (changed or assignments or evicted):
                changed = change(most_lost=math.inf)
        if changed:
            self.actions += changed
            self._ledger.add(changed)

    def fill_minimum(self, demand: Demand) -> None:
        granted = self._granted_to(demand)
        self.actions += _fill_minimum(demand, self._view, granted, self._free, lambda: self._ledger)

    def load_expected(self, demand: Demand) -> None:
        self.actions += _expect(demand, self._view, self._granted_to(demand), self._free)

    def _granted_to(self, demand: Demand) -> list[Roles]:
        return self._granted.get(demand.model.version_id, [])

    def _add(self, actions: Sequence[Action]) -> None:
        """Adds actions, with the slots that loads take and the roles that they grant."""
        self.actions += actions
        for action in actions:
            if isinstance(action, Load):
                self._free.take(action.assignments)
                roles = [assignment.roles for assignment in action.assignments]
                self._granted.setdefault(action.model.version_id, []).extend(roles)


def _scale_from_zero(demand: Demand, view: View, free: FreeSlots) -> list[Action]:
    """Actions that give a waiting model the roles that it lacks for its largest request, else for its smallest; none if
    that needs an eviction.
    """
    for kv_bytes in sorted({demand.most_kv_bytes, demand.least_kv_bytes}, reverse=True):
        missing = view.missing(demand, kv_bytes)
        num_prefill, num_decode = int(Role.PREFILL in missing), int(Role.DECODE in missing)
        slots = free.for_roles(demand.model, demand.avoid, kv_bytes, num_prefill, num_decode)
        assignments = assign(slots, num_prefill, num_decode)
        if assignments:
            cause = "at_zero" if missing >= BOTH else "role_missing"
            return [Load(demand.model, assignments, _load_reason(demand, cause))]
        if missing and (spread := _assign_both_roles(view, demand, missing, kv_bytes)):
            return [spread]
    return []


def _fill_minimum(
    demand: Demand,
    view: View,
    granted: Sequence[Roles],
    free: FreeSlots,
    ledger: Callable[[], Ledger],
) -> list[Action]:
    """Loads the instances that a model lacks of its minimum, into free slots and those of idle models."""
    minimum = view.minimums.get(demand.model.version_id)
    if minimum is None or view.now < demand.not_before:
        return []
    roles = [*(instance.target_roles for instance in view.of(demand.model)), *granted]
    missing = +Counter({role: minimum.number - sum(role in played for played in roles) for role in ROLES})
    if not missing:
        return []
    slots = free.for_roles(demand.model, demand.avoid, 0, missing[Role.PREFILL], missing[Role.DECODE])
    assignments = assign(slots, missing[Role.PREFILL], missing[Role.DECODE])
    actions: list[Action] = []
    if assignments:
        plain = dict.fromkeys(demand.by_tenant, minimum.plain_text)
        figures = {"num_wanted": minimum.number}
        reason = Reason("minimum", minimum.text(view.now), figures, plain)
        actions.append(Load(demand.model, assignments, reason))
        free.take(assignments)
        missing -= Counter(role for assignment in assignments for role in assignment.roles)
    if missing:
        gain = Gain(math.inf, 0.0, f"lacks instances of its minimum, {minimum.number} per role")
        actions += take_idle_slots(demand, missing, repeat(gain), view, ledger())
    return actions


def _expect(demand: Demand, view: View, granted: Sequence[Roles], free: FreeSlots) -> list[Action]:
    """Loads a model whose next request is expected, if a slot is free for it."""
    now = view.now
    if not demand.is_expected(now) or now < demand.not_before or granted or view.of(demand.model):
        return []
    assignments = assign(free.for_roles(demand.model, demand.avoid, 0, 1, 1), 1, 1)
    if not assignments:
        return []
    free.take(assignments)
    left_s = demand.forecast[1] - now
    text = f"its next request is expected within {format_duration(left_s)}, by when it came of late"
    return [Load(demand.model, assignments, Reason("forecast", text, {"left_s": left_s}))]


def _growth(
    demand: Demand,
    view: View,
    granted: Sequence[Roles],
    free: FreeSlots,
) -> Growth | None:
    """Growth of a model that can serve already; None if more instances are not worth their slots."""
    own = view.of(demand.model)
    roles = [*(instance.target_roles for instance in own), *granted]
    playing = Counter(role for played in roles for role in played)
    sizings = sizings_of(demand, playing)
    if (
        not all(playing[role] for role in ROLES)
        or view.now < demand.not_before
        or not (demand.num_late_before or any(sizing.work.fluid.num_saved(sizing.number, 0.0) for sizing in sizings))
    ):
        return None
    load_s = next_load_s(demand, view, free)
    wanted = wanted_instances(demand, playing, load_s, view.config)
    missing = wanted - playing
    if not missing:
        return None
    slots = free.for_roles(
        demand.model, demand.avoid, demand.least_kv_bytes, missing[Role.PREFILL], missing[Role.DECODE]
    )
    gains = [
        (sizing.work.fluid.num_saved(sizing.number, load_s), sizing.work.fluid.held_s(sizing.number, load_s))
        for sizing in sizings
        if not sizing.roles.isdisjoint(missing)
    ]
    saved, held_s = max(gains)
    return Growth(wanted, missing, slots, load_s, max(saved, demand.num_late_before), held_s)


def next_load_s(demand: Demand, view: View, free: FreeSlots) -> float:
    """Predicted load time of one more instance, in a free slot or else in that of an idle instance."""
    nearest = free.of(demand.model, demand.avoid, demand.least_kv_bytes, most=1)
    tier = min(slot.tier for slot in nearest) if nearest else _nearest(demand, view)
    return demand.load_s.get(tier, 0.0)


def _assign_growth(demand: Demand, growth: Growth, missing: Counter[Role]) -> tuple[SlotAssignment, ...]:
    """Slots for the instances that are still ``missing``. If roles are sized apart, each slot gets one role, and the
    role that saves most comes first.
    """
    if demand.decode is None:
        return assign(growth.slots, missing[Role.PREFILL], missing[Role.DECODE])
    savings = [
        (-sizing.work.fluid.num_saved(sizing.number + more, growth.load_s), role)
        for sizing in sizings_of(demand, growth.wanted - missing)
        for role in sizing.roles
        for more in range(missing[role])
    ]
    chosen: dict[str, SlotAssignment] = {}
    for _, role in sorted(savings):
        left = [slot for slot in growth.slots if slot.worker_id not in chosen]
        assigned = assign(left, int(role is Role.PREFILL), int(role is Role.DECODE))
        chosen |= {assignment.worker_id: assignment for assignment in assigned}
    return tuple(chosen.values())


def _gains(demand: Demand, growth: Growth, missing: Counter[Role]) -> Iterator[Gain]:
    """Yields the gain of each instance that is still ``missing``."""
    sizings = [sizing for sizing in sizings_of(demand, growth.playing) if not sizing.roles.isdisjoint(growth.missing)]
    for more in count(max((growth.missing - missing).values(), default=0)):
        saved = growth.num_saved
        if more:
            saved = max(sizing.work.fluid.num_saved(sizing.number + more, growth.load_s) for sizing in sizings)
        yield Gain(saved, growth.held_s, f"saves {saved:.1f} late requests")


def _nearest(demand: Demand, view: View) -> Tier:
    """The nearest tier from which the best slot of an idle instance would load the model."""
    pack_id, workers = demand.model.pack_id, view.membership.workers
    is_held = any(True for _ in view.membership.holders(pack_id))
    tiers = []
    for instance in view.idle:
        worker, store = workers.get(instance.worker_id), view.membership.stores_by_host.get(instance.host_id)
        if worker is not None and store is not None and demand.model.slot_class.fits(worker):
            tiers.append(tier_of(pack_id, store, is_held))
    return min(tiers, default=Tier.PEER)


def _growth_reason(demand: Demand, growth: Growth) -> Reason:
    """Reason of a growth: the late requests that it saves and its load time."""
    numbers = [growth.wanted[role] for role in ROLES]
    num_paid = (growth.load_s + growth.held_s) / demand.late_s
    wanted = f"{numbers[0]} per role wanted"
    if (decode := demand.decode) is not None:
        answers = f"{decode.num_answers} answers, {decode.num_held} on each"
        wanted = f"{numbers[0]} prefill and {numbers[1]} decode wanted ({answers})"
    text = (
        f"{wanted}: the next saves {growth.num_saved:.1f} late requests, costs {num_paid:.1f}, and loads in "
        f"{format_duration(growth.load_s)}; a queue of {format_duration(demand.backlog_s)}, "
        f"a wait of {format_duration(demand.oldest_wait_s)} (target {format_duration(demand.target_s)})"
    )
    figures = {
        "num_wanted": max(growth.wanted[role] for role in growth.missing),
        "num_saved": growth.num_saved,
        "num_paid": num_paid,
        "load_s": growth.load_s,
        "held_s": growth.held_s,
        "backlog_s": demand.backlog_s,
        "oldest_wait_s": demand.oldest_wait_s,
    }
    return _load_reason(demand, "growth", text, figures)


def _load_reason(demand: Demand, cause: str, why: str = "", figures: Mapping[str, int | float] | None = None) -> Reason:
    """Reason of a load. ``why`` may count the requests of all tenants; tenants that share the model see ``cause``
    instead.
    """

    def text(why: str, num_waiting: int, num_cold: int) -> str:
        return f"{why}, {num_waiting} waiting" + (f", {num_cold} placed on loading instances" if num_cold else "")

    plain = cause.replace("_", " ")
    counts = {"num_waiting": demand.num_waiting, "num_cold": demand.num_cold, **(figures or {})}
    by_tenant = {tenant: text(plain, *numbers) for tenant, numbers in demand.by_tenant.items()}
    return Reason(cause, text(why or plain, demand.num_waiting, demand.num_cold), counts, by_tenant)


def _assign_both_roles(view: View, demand: Demand, missing: Roles, kv_bytes: int) -> SetRoles | None:
    """Gives the missing role to an instance of the other role, which moves no weights, so that it serves at once."""
    own = view.of(demand.model)
    for instance in sorted(
        own, key=lambda instance: (instance.phase is not InstancePhase.READY, instance.work.num_open)
    ):
        worker = view.membership.workers.get(instance.worker_id)
        if worker and worker.roles_for(kv_bytes) >= BOTH and instance.takes_roles(view.now):
            names = " and ".join(role.name.lower() for role in sorted(missing))
            reason = Reason("role_missing", f"no instance plays {names}, and no slot is free")
            return SetRoles(instance.instance_id, BOTH, reason)
    return None


def _scale_down(view: View, decided: Sequence[Action]) -> Iterator[Drain]:
    """Yields the drains of instances that were unused for the keep time: all of a model, or those that the others can
    replace.
    """
    demands = {demand.model.version_id: demand for demand in view.demands}
    drained = {action.instance_id for action in decided if isinstance(action, Drain)}
    changed = {action.instance_id for action in decided if isinstance(action, SetRoles)}
    for version_id, staying in view.evaluated.items():
        demand = demands.get(version_id)
        if version_id in view.waited_for or (demand is not None and demand.is_expected(view.now)):
            continue
        if any(instance.instance_id in changed for instance in staying):
            continue  # each of the others may be the last that plays a role
        instances = [instance for instance in staying if instance.instance_id not in drained]
        spare = [instance for instance in instances if instance.instance_id not in view.reserved]
        abandoned_since = view.now - view.config.cancel_after_s
        if all(each.is_loading and view.is_idle_since(each, abandoned_since) for each in instances):
            yield from (Drain(each.instance_id, _CANCELLED) for each in spare)
            continue
        keep_s = view.keep_s(version_id)
        idle = [instance for instance in spare if view.is_idle_since(instance, view.now - keep_s)]
        is_whole, is_deleted = len(idle) == len(instances), demand is not None and demand.is_deleted
        for instance in idle:
            if not is_whole and not _can_do_without(instance, instances, demand):
                continue
            instances = [other for other in instances if other is not instance]
            reason = _idle_reason(view.now - instance.unused_since, keep_s, is_deleted=is_deleted)
            if not is_whole:
                reason = replace(reason, text=f"{reason.text}; others of the model remain")
            yield Drain(instance.instance_id, reason)
        if demand is not None and len(instances) == len(staying):
            yield from _uncrowded(demand, instances, spare, view.now)


def _can_do_without(instance: Instance, instances: Sequence[Instance], demand: Demand | None) -> bool:
    """Whether the model's other ``instances`` serve without an unused one. If requests may be placed on a loading
    instance, it would be loaded again at once.
    """
    is_awaited = instance.is_loading and demand is not None and demand.num_cold > 0
    return not is_awaited and can_spare(instance, instances)


def can_spare(instance: Instance, instances: Sequence[Instance]) -> bool:
    """Whether the other instances play both roles."""
    return cover_both_roles(other for other in instances if other is not instance)


def _uncrowded(demand: Demand, instances: Sequence[Instance], spare: Sequence[Instance], now: float) -> list[Drain]:
    """Drains the least busy instance if one fewer was enough for as long as a late request is worth. Needed because
    dispatch spreads requests over all instances, so that none is ever idle. If roles are sized apart, one per role.
    """
    if demand.num_cold:
        return []  # the loads may be for these requests
    playing = Counter(role for instance in instances for role in instance.target_roles)
    drains = []
    for sizing in sizings_of(demand, playing):
        # Of instances that play both roles, the demand knows when answers needed all of them.
        if sizing.number > 1 and sizing.work is not demand.answers:
            drains += _spare(demand, instances, sizing, spare, now)
    return drains


def _spare(
    demand: Demand, instances: Sequence[Instance], sizing: Sizing, spare: Sequence[Instance], now: float
) -> list[Drain]:
    """Drains an instance that plays only the sizing's roles, unless all that play them were needed recently."""
    playing = [instance for instance in instances if instance.target_roles & sizing.roles]
    spare_s = now - max(sizing.work.last_full_at, *(instance.changed_at for instance in playing))
    if spare_s < demand.spare_s:
        return []
    for instance in sorted(playing, key=lambda instance: (instance.work.num_open, instance.instance_id)):
        if instance in spare and instance.target_roles <= sizing.roles and can_spare(instance, instances):
            text = f"the others were enough for {format_duration(spare_s)} (limit {format_duration(demand.spare_s)})"
            figures = {"idle_s": spare_s, "idle_timeout_s": demand.spare_s}
            return [Drain(instance.instance_id, Reason("idle", text, figures))]
    return []


def _idle_reason(idle_s: float, keep_s: float, *, is_deleted: bool) -> Reason:
    limit = "its model is deleted" if is_deleted else f"limit {format_duration(keep_s)}"
    return Reason("idle", f"idle for {format_duration(idle_s)} ({limit})", {"idle_s": idle_s, "idle_timeout_s": keep_s})
