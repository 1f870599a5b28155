"""Autoscaling: which instances to load, drain or give other roles, decided for the whole cluster at once.

Up: directly to the number of prefill and decode instances that the queue justifies. Slots are taken in this order: free
ones, other roles for the model's own instances, an idle model's slot, a busy model's second slot, and last a busy
model's only slot, in turns. A model that can serve, and only wants more, gets free slots and those of idle models.
Down: to zero after the idle timeout; an unwanted load is cancelled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from torchrelay.common.quantities import format_duration
from torchrelay.scheduler.policy.autoscaling.autoscaler_input import (
    Action,
    AutoscalerInput,
    Demand,
    Drain,
    InstanceLoad,
    SetRoles,
    Wake,
    cover_both_roles,
)
from torchrelay.scheduler.policy.autoscaling.freeing_slots import FreeingSlots
from torchrelay.scheduler.policy.autoscaling.instance_eviction import evict, evict_to_grow
from torchrelay.scheduler.policy.autoscaling.slot_assignment import assign, free_slots
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.core import BOTH, InstancePhase, Role, Roles, WorkerStatus
from torchrelay.scheduler.policy.reasons import Reason


def decide(autoscaler_input: AutoscalerInput, config: PolicyConfig, *, is_complete: bool = True) -> tuple[Action, ...]:
    """All actions that are due. Deciding again after applying them yields no more. Unless it ``is_complete``, the input
    has the demands of some models only, and is about these.

    First every waiting model gets what it needs to serve at all, the longest wait first; then models scale up, but not
    into slots for which a model without any still waits: not at all, unless every model that waits is decided on.
    """
    actions: list[Action] = []
    is_wanted = any(one.num_waiting or one.num_cold or one.backlog_s for one in autoscaler_input.demands)
    free = _free_workers(autoscaler_input) if is_wanted else {}
    granted: dict[str, list[Roles]] = {}
    starving: list[Demand] = []
    demands = sorted(autoscaler_input.demands, key=lambda demand: -demand.slot_wait_s)
    for demand in demands:
        if not demand.num_waiting or autoscaler_input.now < demand.not_before:
            continue
        if not autoscaler_input.missing(demand, demand.most_kv_bytes):
            continue
        started = _scale_from_zero(demand, autoscaler_input, free)
        _mark_taken(started, free, granted)
        actions += started
        if not started:
            starving.append(demand)
    freeing = cache(lambda: FreeingSlots(autoscaler_input, config, decided=actions))
    for demand in starving:
        actions += evict(demand, autoscaler_input, freeing(), config)
    for demand in starving:
        slots = free_slots(demand.model, free.values(), autoscaler_input.stores, frozenset(), demand.most_kv_bytes)
        for slot in slots:
            del free[slot.worker_id]
    for demand in demands if autoscaler_input.has_all_waiting else ():
        wanted, missing = _growth(demand, autoscaler_input, granted.get(demand.model.version_id, []), config)
        if not missing:
            continue
        grown = _scale_up(demand, wanted, missing, autoscaler_input, free, config)
        _mark_taken(grown, free, granted)
        actions += grown
        missing.subtract(role for wake in grown for assignment in wake.assignments for role in assignment.roles)
        if +missing:
            actions += evict_to_grow(demand, +missing, autoscaler_input, freeing(), config)
    staying = autoscaler_input.staying if is_complete else autoscaler_input.staying_of_some
    actions += _scale_down(staying, autoscaler_input, actions, config)
    return tuple(actions)


def _free_workers(autoscaler_input: AutoscalerInput) -> dict[str, WorkerStatus]:
    occupied, suspects = autoscaler_input.instance_loads.occupied, autoscaler_input.suspects
    return {
        worker_id: worker
        for worker_id, worker in autoscaler_input.free_workers.items()
        if worker_id not in occupied and worker_id not in suspects
    }


def _mark_taken(actions: Sequence[Action], free: dict[str, WorkerStatus], granted: dict[str, list[Roles]]) -> None:
    """Removes the slots of wakes from the free ones."""
    for action in actions:
        if isinstance(action, Wake):
            for assignment in action.assignments:
                del free[assignment.worker_id]
                granted.setdefault(action.model.version_id, []).append(assignment.roles)


def wanted_instances(demand: Demand, num_ready: int, num_loading: int, config: PolicyConfig) -> int:
    """Instances per role that the demand justifies, up to the model's maximum."""
    unserved = demand.num_waiting + demand.num_cold
    batches = unserved / config.requests_per_instance
    by_count = num_ready + math.floor(batches) if num_ready else math.ceil(batches)
    by_backlog = math.ceil(demand.backlog_s / config.queue_target_s) if demand.backlog_s > config.queue_target_s else 0
    by_wait = num_ready + 1 if demand.oldest_wait_s > config.queue_target_s and num_ready and not num_loading else 0
    least = 1 if demand.num_waiting else 0
    return min(max(by_count, by_backlog, by_wait, least), demand.model.max_instances or config.max_instances)


def _scale_from_zero(
    demand: Demand, autoscaler_input: AutoscalerInput, free: Mapping[str, WorkerStatus]
) -> list[Action]:
    """Actions that give a waiting model the roles it lacks for each of its requests, else for the smallest; none if it
    needs an eviction.
    """
    for kv_bytes in sorted({demand.most_kv_bytes, demand.least_kv_bytes}, reverse=True):
        missing = autoscaler_input.missing(demand, kv_bytes)
        slots = free_slots(demand.model, free.values(), autoscaler_input.stores, demand.avoid, kv_bytes)
        assignments = assign(slots, Role.PREFILL in missing, Role.DECODE in missing)
        if assignments:
            cause = "at_zero" if missing >= BOTH else "role_missing"
            return [Wake(demand.model, assignments, _wake_reason(demand, cause))]
        if missing and (spread := _assign_both_roles(autoscaler_input, demand, missing, kv_bytes)):
            return [spread]
    return []


def _growth(
    demand: Demand, autoscaler_input: AutoscalerInput, granted: Sequence[Roles], config: PolicyConfig
) -> tuple[int, Counter[Role]]:
    """How many instances per role a model wants that can already serve, and how many more these are."""
    if not demand.num_waiting and not demand.num_cold and demand.backlog_s <= config.queue_target_s:
        return 0, Counter()
    own = autoscaler_input.of(demand.model)
    roles = [*(load.instance.target_roles for load in own), *granted]
    if not frozenset().union(*roles) >= BOTH or autoscaler_input.now < demand.not_before:
        return 0, Counter()
    num_loading = sum(load.instance.phase is InstancePhase.LOADING for load in own) + len(granted)
    ready = [load.instance for load in own if load.instance.phase is InstancePhase.READY]
    num_ready = min(sum(instance.plays(role) for instance in ready) for role in Role)
    wanted = wanted_instances(demand, num_ready, num_loading, config)
    return wanted, +Counter({role: wanted - sum(role in one for one in roles) for role in Role})


def _scale_up(
    demand: Demand,
    wanted: int,
    missing: Counter[Role],
    autoscaler_input: AutoscalerInput,
    free: Mapping[str, WorkerStatus],
    config: PolicyConfig,
) -> list[Wake]:
    """More instances, as far as there are free slots."""
    stores, kv_bytes = autoscaler_input.stores, demand.least_kv_bytes
    slots = free_slots(demand.model, free.values(), stores, demand.avoid, kv_bytes)
    assignments = assign(slots, missing[Role.PREFILL], missing[Role.DECODE])
    return [Wake(demand.model, assignments, _growth_reason(demand, wanted, config))] if assignments else []


def _growth_reason(demand: Demand, wanted: int, config: PolicyConfig) -> Reason:
    """What of the demand exceeds its bound."""
    target = f"(target {format_duration(config.queue_target_s)})"
    exceeded = [f"{wanted} per role wanted"]
    if demand.num_waiting + demand.num_cold >= config.requests_per_instance:
        exceeded.append(f"one for each {config.requests_per_instance} requests")
    if demand.backlog_s > config.queue_target_s:
        exceeded.append(f"a queue of {format_duration(demand.backlog_s)} {target}")
    if demand.oldest_wait_s > config.queue_target_s:
        exceeded.append(f"a wait of {format_duration(demand.oldest_wait_s)} {target}")
    figures = {"num_wanted": wanted, "backlog_s": demand.backlog_s, "oldest_wait_s": demand.oldest_wait_s}
    return _wake_reason(demand, "growth", ", ".join(exceeded), figures)


def _wake_reason(demand: Demand, cause: str, why: str = "", figures: Mapping[str, int | float] | None = None) -> Reason:
    """``why`` may count the requests of all tenants: where several share the model, they see ``cause`` instead."""

    def text(why: str, num_waiting: int, num_cold: int) -> str:
        return f"{why}, {num_waiting} waiting" + (f", {num_cold} placed on loading instances" if num_cold else "")

    plain = cause.replace("_", " ")
    counts = {"num_waiting": demand.num_waiting, "num_cold": demand.num_cold, **(figures or {})}
    by_tenant = {tenant: text(plain, *numbers) for tenant, numbers in demand.by_tenant.items()}
    return Reason(cause, text(why or plain, demand.num_waiting, demand.num_cold), counts, by_tenant)


def _assign_both_roles(
    autoscaler_input: AutoscalerInput, demand: Demand, missing: Roles, kv_bytes: int
) -> SetRoles | None:
    """Gives the missing role to an instance of the other one: no weights move, so requests go on at once."""
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
    """Drains what was unused for the idle timeout: a whole model, or instances that the others can do without."""
    placed_cold = {demand.model.version_id for demand in autoscaler_input.demands if demand.num_cold}
    drained = {action.instance_id for action in decided if isinstance(action, Drain)}
    actions: list[Action] = []
    for version_id, staying in staying_of.items():
        if version_id in autoscaler_input.waited_for:
            continue
        loads = [load for load in staying if load.instance.instance_id not in drained]
        timeout_s = autoscaler_input.idle_timeouts_s.get(version_id) or config.idle_timeout_s
        abandoned_since = autoscaler_input.now - config.cancel_after_s
        if all(load.instance.phase is InstancePhase.LOADING and load.is_idle_since(abandoned_since) for load in loads):
            cancelled = Reason("cancel", "no request waits for it any more")
            actions += [Drain(load.instance.instance_id, cancelled) for load in loads]
            continue
        idle = [load for load in loads if load.is_idle_since(autoscaler_input.now - timeout_s)]
        reasons = {
            load.instance.instance_id: _idle_reason(autoscaler_input.now - load.unused_since, timeout_s)
            for load in idle
        }
        if len(idle) == len(loads):
            actions += [Drain(instance_id, reason) for instance_id, reason in reasons.items()]
            continue
        for load in idle:
            if load.instance.phase is InstancePhase.LOADING and version_id in placed_cold:
                continue  # it may be meant for requests placed on it: drained, it would be loaded again at once
            rest = [other for other in loads if other is not load]
            if cover_both_roles(other.instance for other in rest):
                loads = rest
                reason = reasons[load.instance.instance_id]
                spared = replace(reason, text=f"{reason.text}; others of the model remain")
                actions.append(Drain(load.instance.instance_id, spared))
    return actions


def _idle_reason(idle_s: float, timeout_s: float) -> Reason:
    text = f"idle for {format_duration(idle_s)} (limit {format_duration(timeout_s)})"
    return Reason("idle", text, {"idle_s": idle_s, "idle_timeout_s": timeout_s})
