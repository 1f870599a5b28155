"""Scaling: what is loaded, drained or given other roles, decided from the whole situation at once.

Up: straight to the number of prefill and decode instances that the queue justifies; free slots first, then the roles of
the model's own instances, then the slot of an idle model, last the second slot of a busy one. Down: after the idle
timeout, to zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torchrelay.scheduler.core import BOTH, Phase, Role, Roles, Worker
from torchrelay.scheduler.making_room import make_room
from torchrelay.scheduler.rules import Rules
from torchrelay.scheduler.situation import Action, Demand, Drain, Load, SetRoles, Situation, Wake, covers
from torchrelay.scheduler.slots import assign, free_slots


def decide(situation: Situation, rules: Rules) -> tuple[Action, ...]:
    """Everything to be done now. Applying it and deciding again at once gives nothing more."""
    actions: list[Action] = []
    occupied = {load.instance.worker_id for load in situation.loads}
    free = {worker_id: worker for worker_id, worker in situation.workers.items() if worker_id not in occupied}
    free = {worker_id: worker for worker_id, worker in free.items() if worker.slot.phase is Phase.FREE}
    for demand in sorted(situation.demands, key=lambda demand: -demand.oldest_wait_s):
        grown = _grow(demand, situation, free, actions, rules)
        for action in grown:
            if isinstance(action, Wake):
                for assignment in action.assignments:
                    del free[assignment.worker_id]
        actions += grown
    actions += _idle(situation, actions, rules)
    return tuple(actions)


def wanted_instances(demand: Demand, num_ready: int, num_loading: int, rules: Rules) -> int:
    """Instances per role that the demand justifies now, at most the model's maximum."""
    unserved = demand.num_waiting + demand.num_cold
    batches = unserved / rules.requests_per_instance
    by_count = num_ready + math.floor(batches) if num_ready else math.ceil(batches)
    by_backlog = 0
    if demand.backlog_s > rules.queue_target_s:
        by_backlog = math.ceil(demand.backlog_s / rules.queue_target_s)
    by_wait = num_ready + 1 if demand.oldest_wait_s > rules.queue_target_s and num_ready and not num_loading else 0
    least = 1 if demand.num_waiting else 0
    return min(max(by_count, by_backlog, by_wait, least), demand.model.max_instances or rules.max_instances)


def _grow(
    demand: Demand, situation: Situation, free: Mapping[str, Worker], decided: Sequence[Action], rules: Rules
) -> list[Action]:
    model = demand.model
    own = [load for load in situation.loads if load.instance.version_id == model.version_id and load.instance.staying]
    num = {role: sum(role in load.instance.roles_to_be for load in own) for role in Role}
    num_loading = sum(load.instance.phase is Phase.LOADING for load in own)
    ready = [load.instance for load in own if load.instance.phase is Phase.READY]
    num_ready = min(sum(instance.plays(role) for instance in ready) for role in Role)
    wanted = wanted_instances(demand, num_ready, num_loading, rules)
    missing = {role: max(wanted - num[role], 0) for role in Role}
    if not any(missing.values()) or situation.now < demand.not_before:
        return []
    slots = free_slots(model, free.values(), situation.stores, demand.avoid)
    assignments = assign(slots, missing[Role.PREFILL], missing[Role.DECODE])
    actions: list[Action] = []
    played: Roles = frozenset(role for load in own for role in load.instance.roles_to_be)
    if assignments:
        actions.append(Wake(model, assignments, _wake_reason(demand, bool(own), wanted)))
        played = played.union(*(assignment.roles for assignment in assignments))
    if played >= BOTH:
        return actions
    if spread := _play_both(own, situation.workers, BOTH - played):
        return [*actions, spread]
    if own:
        return actions  # half of it is there; the other half comes with the next free slot
    return [*actions, *make_room(demand, situation, decided, rules)]


def _wake_reason(demand: Demand, grows: bool, wanted: int) -> str:
    asked = f"{demand.num_waiting} waiting, {demand.num_cold} on loading instances, wanted {wanted} per role"
    return f"more instances: {asked}" if grows else f"woken from zero: {asked}"


def _play_both(own: Sequence[Load], workers: Mapping[str, Worker], missing: Roles) -> SetRoles | None:
    """The missing role goes to an instance of the other one: no weights move, so its requests go on at once."""
    for load in sorted(own, key=lambda load: (load.instance.phase is not Phase.READY, load.num_open)):
        worker = workers.get(load.instance.worker_id)
        if worker and worker.can_play >= BOTH and load.instance.placeable and load.instance.pending_roles is None:
            names = " and ".join(role.name.lower() for role in sorted(missing))
            return SetRoles(load.instance.instance_id, BOTH, f"no instance plays {names}, and no slot is free")
    return None


def _idle(situation: Situation, decided: Sequence[Action], rules: Rules) -> list[Action]:
    """Drains of what nobody has used for the idle timeout: a whole model, or instances the others can do without."""
    waited_for = {demand.model.version_id for demand in situation.demands if demand.num_waiting}
    drained = {action.instance_id for action in decided if isinstance(action, Drain)}
    staying: dict[str, list[Load]] = {}
    for load in situation.loads:
        if load.instance.staying and load.instance.instance_id not in drained:
            staying.setdefault(load.instance.version_id, []).append(load)
    actions: list[Action] = []
    for version_id, loads in staying.items():
        if version_id in waited_for:
            continue
        timeout_s = situation.idle_timeouts_s.get(version_id) or rules.idle_timeout_s
        idle = [load for load in loads if load.is_idle_since(situation.now - timeout_s)]
        reason = f"idle for {timeout_s:g} s"
        if len(idle) == len(loads):
            actions += [Drain(load.instance.instance_id, "idle", reason) for load in idle]
            continue
        for load in idle:
            rest = [other for other in loads if other is not load]
            if covers(other.instance for other in rest):
                loads = rest
                actions.append(Drain(load.instance.instance_id, "idle", f"{reason}; others of the model remain"))
    return actions
