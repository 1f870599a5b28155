"""Room for a model that waits without any slot: an idle model's slot, or the second slot of a busy model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchrelay.scheduler.core import BOTH, Model, Phase, Role, Roles, Worker
from torchrelay.scheduler.rules import Rules
from torchrelay.scheduler.situation import Action, Demand, Drain, Load, SetRoles, Situation, covers
from torchrelay.scheduler.slots import free_slots


def make_room(demand: Demand, situation: Situation, decided: Sequence[Action], rules: Rules) -> list[SetRoles | Drain]:
    """Drains that free the least that serves the model: one slot that plays both roles, else one for each.

    Nothing while a slot that will do is being freed already.
    """
    usable = _usable(demand.model, situation)
    emptied = {action.instance_id for action in decided if isinstance(action, Drain)}
    for load in situation.loads:
        leaves = load.instance.phase is Phase.DRAINING or load.instance.instance_id in emptied
        if leaves and usable.get(load.instance.worker_id, frozenset()) >= BOTH:
            return []
    idle = _idle_victims(demand.model, situation, usable)
    victims = [load for load in idle if load.instance.instance_id not in emptied]
    if chosen := _fewest(victims, usable):
        reason = f"idle, and {demand.model.name} waits for a slot"
        return [Drain(load.instance.instance_id, "evict", reason) for load in chosen]
    if demand.oldest_wait_s < rules.share_after_s:
        return []
    return _share(demand.model, situation, usable)


def _usable(model: Model, situation: Situation) -> dict[str, Roles]:
    """Workers that could take the model if their slot were free, with the roles they can play."""
    slots = free_slots(model, situation.workers.values(), situation.stores, frozenset())
    return {slot.worker_id: slot.can_play for slot in slots}


def _idle_victims(model: Model, situation: Situation, usable: Mapping[str, Roles]) -> list[Load]:
    """Instances of other models that nobody uses or waits for, longest idle first."""
    waited_for = {demand.model.version_id for demand in situation.demands if demand.num_waiting}
    idle = [
        load
        for load in situation.loads
        if load.instance.staying
        and load.is_idle_since(situation.now)
        and load.instance.version_id not in waited_for | {model.version_id}
        and load.instance.worker_id in usable
    ]
    return sorted(idle, key=lambda load: (load.instance.last_active, load.instance.instance_id))


def _fewest(victims: Sequence[Load], usable: Mapping[str, Roles]) -> list[Load]:
    for load in victims:
        if usable[load.instance.worker_id] >= BOTH:
            return [load]
    one_each = [next((load for load in victims if role in usable[load.instance.worker_id]), None) for role in Role]
    return [load for load in one_each if load is not None] if all(one_each) else []


def _share(model: Model, situation: Situation, usable: Mapping[str, Roles]) -> list[SetRoles | Drain]:
    """A busy model with two slots or more gives one up: the others cover its roles, or one of them takes both.

    The prefill instance goes first: its work ends soon, while decoding goes on undisturbed.
    """
    by_version: dict[str, list[Load]] = {}
    for load in situation.loads:
        if load.instance.phase is Phase.READY and load.instance.pending_roles is None:
            by_version.setdefault(load.instance.version_id, []).append(load)
    reason = f"{model.name} waits for a slot, and this model has more than one"
    best: tuple[tuple[bool, bool, int, str], list[SetRoles | Drain]] | None = None
    for loads in by_version.values():
        for victim in loads:
            if not usable.get(victim.instance.worker_id, frozenset()) >= BOTH:
                continue
            rest = [load for load in loads if load is not victim]
            keeper = next((load for load in rest if _can_play_both(load, situation.workers)), None)
            covered = covers(load.instance for load in rest)
            if not covered and keeper is None:
                continue
            actions: list[SetRoles | Drain] = [Drain(victim.instance.instance_id, "share", reason)]
            if not covered and keeper is not None:
                actions.insert(0, SetRoles(keeper.instance.instance_id, BOTH, reason))
            decodes = victim.instance.plays(Role.DECODE)
            cost = (not covered, decodes, victim.num_open, victim.instance.instance_id)
            if best is None or cost < best[0]:
                best = (cost, actions)
    return best[1] if best else []


def _can_play_both(load: Load, workers: Mapping[str, Worker]) -> bool:
    worker = workers.get(load.instance.worker_id)
    return worker is not None and worker.can_play >= BOTH
