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
from torchrelay.scheduler.policy.autoscaling.asks import Gain, take_idle_slots, take_slots
from torchrelay.scheduler.policy.autoscaling.autoscaler_input import (
    Action,
    AutoscalerInput,
    Demand,
    Drain,
    InstanceLoad,
    Load,
    SetRoles,
    cover_both_roles,
)
from torchrelay.scheduler.policy.autoscaling.free_slots import FreeSlots
from torchrelay.scheduler.policy.autoscaling.ledger import Ledger
from torchrelay.scheduler.policy.autoscaling.role_changes import change_role
from torchrelay.scheduler.policy.autoscaling.sizing import Growth, Sizing, sizings_of, wanted_instances
from torchrelay.scheduler.policy.autoscaling.slot_assignment import SlotAssignment, assign
from torchrelay.scheduler.policy.cluster.free_workers import FreeWorkers
from torchrelay.scheduler.policy.cluster.storage_tiers import Tier, tier_of
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.types import BOTH, ROLES, InstancePhase, Role, Roles


def decide(autoscaler_input: AutoscalerInput, config: PolicyConfig, *, is_complete: bool = True) -> tuple[Action, ...]:
    """All actions that are due; deciding again after applying them yields none. Unless ``is_complete``, the input has
    the demands of some models only, and the decision is about these.
    """
    decision = _Decision(autoscaler_input, config)
    starving = [demand for demand in decision.lacking() if not decision.load_into_free_slots(demand)]
    for demand in starving:
        decision.take_slot(demand)
    decision.keep_free_for(starving)
    if autoscaler_input.has_all_waiting:
        for demand in decision.demands:
            decision.grow(demand)
        for demand in decision.demands:
            decision.fill_minimum(demand)
            decision.load_expected(demand)
    staying = autoscaler_input.staying if is_complete else autoscaler_input.staying_of_some
    return (*decision.actions, *_scale_down(staying, autoscaler_input, decision.actions, config))


class _Decision:
    """The actions so far, with the free slots that they leave and the roles that they grant, by version."""

    def __init__(self, autoscaler_input: AutoscalerInput, config: PolicyConfig) -> None:
        self.actions: list[Action] = []
        # The longest wait for a slot comes first.
        self.demands = sorted(autoscaler_input.demands, key=lambda demand: -demand.slot_wait_s)
        self._input, self._config = autoscaler_input, config
        self._granted: dict[str, list[Roles]] = {}
        is_wanted = bool(autoscaler_input.minimums) or any(
            demand.num_waiting
            or demand.num_cold
            or demand.backlog_s
            or demand.decode
            or demand.answers
            or demand.is_expected(autoscaler_input.now)
            for demand in autoscaler_input.demands
        )
        self._free = FreeSlots(autoscaler_input, autoscaler_input.free_workers if is_wanted else FreeWorkers())

    @cached_property
    def _ledger(self) -> Ledger:
        return Ledger(self._input, self._config, decided=self.actions)

    def lacking(self) -> list[Demand]:
        """Models that lack a role for a waiting request: those of tenants without any slot first."""
        lacking = [
            demand
            for demand in self.demands
            if demand.num_waiting
            and self._input.now >= demand.not_before
            and self._input.missing(demand, demand.most_kv_bytes)
        ]
        if len(lacking) > 1:
            lacking.sort(key=lambda demand: not demand.slotless_tenant(self._input.num_slots_of))
        return lacking

    def load_into_free_slots(self, demand: Demand) -> bool:
        """Gives the model the roles that it lacks, without taking a slot from another; whether it could."""
        started = _scale_from_zero(demand, self._input, self._free)
        self._add(started)
        return bool(started)

    def take_slot(self, demand: Demand) -> None:
        self.actions += take_slots(demand, self._input, self._ledger)

    def keep_free_for(self, demands: Iterable[Demand]) -> None:
        """Leaves the slots that suit these models in part to them: no model grows into these."""
        for demand in demands:
            self._free.take(self._free.of(demand.model, kv_bytes=demand.most_kv_bytes))

    def grow(self, demand: Demand) -> None:
        """Adds instances of a model that serves: by an instance that its other role can spare, then into free slots and
        slots of idle models, and last by an instance that is worth less to its other role.
        """
        growth = _growth(demand, self._input, self._granted_to(demand), self._free, self._config)
        if growth is None:
            return
        change = partial(change_role, demand, growth, self._input, self.actions, self._config)
        changed = change(most_lost=1.0)  # an instance that the other role can spare serves at once, without a slot
        missing = growth.missing - Counter(role for action in changed for role in action.roles)
        assignments = _assign_growth(demand, growth, missing)
        if assignments:
            self._add([Load(demand.model, assignments, _growth_reason(demand, growth))])
        missing -= Counter(role for assignment in assignments for role in assignment.roles)
        if missing:
            evicted = take_idle_slots(demand, missing, _gains(demand, growth, missing), self._input, self._ledger)
            self.actions += evicted
            if not (changed or assignments or evicted):
                changed = change(most_lost=math.inf)
        if changed:
            self.actions += changed
            self._ledger.add(changed)

    def fill_minimum(self, demand: Demand) -> None:
        granted = self._granted_to(demand)
        self.actions += _fill_minimum(demand, self._input, granted, self._free, lambda: self._ledger)

    def load_expected(self, demand: Demand) -> None:
        self.actions += _expect(demand, self._input, self._granted_to(demand), self._free)

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


def _scale_from_zero(demand: Demand, autoscaler_input: AutoscalerInput, free: FreeSlots) -> list[Action]:
    """Actions that give a waiting model the roles that it lacks for its largest request, else for its smallest; none if
    that needs an eviction.
    """
    for kv_bytes in sorted({demand.most_kv_bytes, demand.least_kv_bytes}, reverse=True):
        missing = autoscaler_input.missing(demand, kv_bytes)
        num_prefill, num_decode = int(Role.PREFILL in missing), int(Role.DECODE in missing)
        slots = free.for_roles(demand.model, demand.avoid, kv_bytes, num_prefill, num_decode)
        assignments = assign(slots, num_prefill, num_decode)
        if assignments:
            cause = "at_zero" if missing >= BOTH else "role_missing"
            return [Load(demand.model, assignments, _load_reason(demand, cause))]
        if missing and (spread := _assign_both_roles(autoscaler_input, demand, missing, kv_bytes)):
            return [spread]
    return []


def _fill_minimum(
    demand: Demand,
    autoscaler_input: AutoscalerInput,
    granted: Sequence[Roles],
    free: FreeSlots,
    ledger: Callable[[], Ledger],
) -> list[Action]:
    """Loads the instances that a model lacks of its minimum, into free slots and those of idle models."""
    minimum = autoscaler_input.minimums.get(demand.model.version_id)
    if minimum is None or autoscaler_input.now < demand.not_before:
        return []
    roles = [*(load.instance.target_roles for load in autoscaler_input.of(demand.model)), *granted]
    missing = +Counter({role: minimum.number - sum(role in played for played in roles) for role in ROLES})
    if not missing:
        return []
    slots = free.for_roles(demand.model, demand.avoid, 0, missing[Role.PREFILL], missing[Role.DECODE])
    assignments = assign(slots, missing[Role.PREFILL], missing[Role.DECODE])
    actions: list[Action] = []
    if assignments:
        plain = dict.fromkeys(demand.by_tenant, minimum.plain_text)
        figures = {"num_wanted": minimum.number}
        reason = Reason("minimum", minimum.text(autoscaler_input.now), figures, plain)
        actions.append(Load(demand.model, assignments, reason))
        free.take(assignments)
        missing -= Counter(role for assignment in assignments for role in assignment.roles)
    if missing:
        gain = Gain(math.inf, 0.0, f"lacks instances of its minimum, {minimum.number} per role")
        actions += take_idle_slots(demand, missing, repeat(gain), autoscaler_input, ledger())
    return actions


def _expect(
    demand: Demand, autoscaler_input: AutoscalerInput, granted: Sequence[Roles], free: FreeSlots
) -> list[Action]:
    """Loads a model whose next request is expected, if a slot is free for it."""
    now = autoscaler_input.now
    if not demand.is_expected(now) or now < demand.not_before or granted or autoscaler_input.of(demand.model):
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
    autoscaler_input: AutoscalerInput,
    granted: Sequence[Roles],
    free: FreeSlots,
    config: PolicyConfig,
) -> Growth | None:
    """Growth of a model that can serve already; None if more instances are not worth their slots."""
    own = autoscaler_input.of(demand.model)
    roles = [*(load.instance.target_roles for load in own), *granted]
    playing = Counter(role for played in roles for role in played)
    sizings = sizings_of(demand, playing)
    if (
        not all(playing[role] for role in ROLES)
        or autoscaler_input.now < demand.not_before
        or not (demand.num_late_before or any(sizing.work.fluid.num_saved(sizing.number, 0.0) for sizing in sizings))
    ):
        return None
    load_s = next_load_s(demand, autoscaler_input, free)
    wanted = wanted_instances(demand, playing, load_s, config)
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


def next_load_s(demand: Demand, autoscaler_input: AutoscalerInput, free: FreeSlots) -> float:
    """Predicted load time of one more instance, in a free slot or else in that of an idle instance."""
    nearest = free.of(demand.model, demand.avoid, demand.least_kv_bytes, most=1)
    tier = min(slot.tier for slot in nearest) if nearest else _nearest(demand, autoscaler_input)
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


def _nearest(demand: Demand, autoscaler_input: AutoscalerInput) -> Tier:
    """The nearest tier from which the best slot of an idle instance would load the model."""
    pack_id, workers = demand.model.pack_id, autoscaler_input.workers
    is_held = any(True for _ in autoscaler_input.holder_index.holders(pack_id))
    tiers = []
    for instance in autoscaler_input.idle:
        worker, store = workers.get(instance.worker_id), autoscaler_input.stores.get(instance.host_id)
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


def _assign_both_roles(
    autoscaler_input: AutoscalerInput, demand: Demand, missing: Roles, kv_bytes: int
) -> SetRoles | None:
    """Gives the missing role to an instance of the other role, which moves no weights, so that it serves at once."""
    own = autoscaler_input.of(demand.model)
    for load in sorted(own, key=lambda load: (load.instance.phase is not InstancePhase.READY, load.num_open)):
        worker = autoscaler_input.workers.get(load.instance.worker_id)
        if worker and worker.roles_for(kv_bytes) >= BOTH and load.instance.takes_roles(autoscaler_input.now):
            names = " and ".join(role.name.lower() for role in sorted(missing))
            reason = Reason("role_missing", f"no instance plays {names}, and no slot is free")
            return SetRoles(load.instance.instance_id, BOTH, reason)
    return None


def _scale_down(
    staying_of: Mapping[str, Sequence[InstanceLoad]],
    autoscaler_input: AutoscalerInput,
    decided: Sequence[Action],
    config: PolicyConfig,
) -> list[Action]:
    """Drains instances that were unused for the idle timeout: all of a model, or those that the others can replace."""
    demands = {demand.model.version_id: demand for demand in autoscaler_input.demands}
    drained = {action.instance_id for action in decided if isinstance(action, Drain)}
    changed = {action.instance_id for action in decided if isinstance(action, SetRoles)}
    actions: list[Action] = []
    for version_id, staying in staying_of.items():
        if version_id in autoscaler_input.waited_for:
            continue
        if any(load.instance.instance_id in changed for load in staying):
            continue  # each of the others may be the last that plays a role
        loads = [load for load in staying if load.instance.instance_id not in drained]
        reserved = [load for load in loads if load.instance.instance_id in autoscaler_input.reserved]
        demand = demands.get(version_id)
        if demand is not None and demand.is_expected(autoscaler_input.now):
            continue
        keep_s = autoscaler_input.keep_s.get(version_id, config.late_cost_s)
        abandoned_since = autoscaler_input.now - config.cancel_after_s
        if all(load.instance.phase is InstancePhase.LOADING and load.is_idle_since(abandoned_since) for load in loads):
            cancelled = Reason("cancel", "no request waits for it any more")
            actions += [Drain(load.instance.instance_id, cancelled) for load in loads if load not in reserved]
            continue
        idle = [load for load in loads if load.is_idle_since(autoscaler_input.now - keep_s) and load not in reserved]
        is_deleted = demand is not None and demand.is_deleted
        reasons = {
            load.instance.instance_id: _idle_reason(
                autoscaler_input.now - load.unused_since, keep_s, is_deleted=is_deleted
            )
            for load in idle
        }
        if len(idle) == len(loads):
            actions += [Drain(instance_id, reason) for instance_id, reason in reasons.items()]
            continue
        for load in idle:
            if load.instance.phase is InstancePhase.LOADING and demand is not None and demand.num_cold:
                continue  # requests may be placed on it: if drained, it would be loaded again at once
            if can_spare(load, loads):
                loads = [other for other in loads if other is not load]
                reason = reasons[load.instance.instance_id]
                spared = replace(reason, text=f"{reason.text}; others of the model remain")
                actions.append(Drain(load.instance.instance_id, spared))
        if demand is not None and len(loads) == len(staying):
            actions += _uncrowded(demand, loads, reserved, autoscaler_input.now)
    return actions


def can_spare(load: InstanceLoad, loads: Sequence[InstanceLoad]) -> bool:
    """Whether the other instances play both roles."""
    return cover_both_roles(other.instance for other in loads if other is not load)


def _uncrowded(
    demand: Demand, loads: Sequence[InstanceLoad], reserved: Sequence[InstanceLoad], now: float
) -> list[Drain]:
    """Drains the least busy instance if one fewer was enough for as long as a late request is worth. Needed because
    dispatch spreads requests over all instances, so that none is ever idle. If roles are sized apart, one per role.
    """
    if demand.num_cold:
        return []  # the loads may be for these requests
    playing = Counter(role for load in loads for role in load.instance.target_roles)
    drains = []
    for sizing in sizings_of(demand, playing):
        # Of instances that play both roles, the demand knows when answers needed all of them.
        if sizing.number > 1 and sizing.work is not demand.answers:
            drains += _spare(demand, loads, sizing, reserved, now)
    return drains


def _spare(
    demand: Demand, loads: Sequence[InstanceLoad], sizing: Sizing, reserved: Sequence[InstanceLoad], now: float
) -> list[Drain]:
    """Drains an instance that plays only the sizing's roles, unless all that play them were needed recently."""
    playing = [load for load in loads if load.instance.target_roles & sizing.roles]
    spare_s = now - max(sizing.work.last_full_at, *(load.instance.changed_at for load in playing))
    if spare_s < demand.spare_s:
        return []
    for load in sorted(playing, key=lambda load: (load.num_open, load.instance.instance_id)):
        if load not in reserved and load.instance.target_roles <= sizing.roles and can_spare(load, loads):
            text = f"the others were enough for {format_duration(spare_s)} (limit {format_duration(demand.spare_s)})"
            figures = {"idle_s": spare_s, "idle_timeout_s": demand.spare_s}
            return [Drain(load.instance.instance_id, Reason("idle", text, figures))]
    return []


def _idle_reason(idle_s: float, keep_s: float, *, is_deleted: bool) -> Reason:
    limit = "its model is deleted" if is_deleted else f"limit {format_duration(keep_s)}"
    return Reason("idle", f"idle for {format_duration(idle_s)} ({limit})", {"idle_s": idle_s, "idle_timeout_s": keep_s})
