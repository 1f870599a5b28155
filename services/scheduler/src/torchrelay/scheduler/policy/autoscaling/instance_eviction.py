"""Frees a slot for a model that waits without any: an idle model's slot, a busy model's second slot, or the slot of a
busy model whose turn ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torchrelay.scheduler.policy.autoscaling.autoscaler_input import (
    Action,
    AutoscalerInput,
    Demand,
    Drain,
    InstanceLoad,
    SetRoles,
    cover_both_roles,
)
from torchrelay.scheduler.policy.autoscaling.slot_assignment import free_slots
from torchrelay.scheduler.policy.cluster.version_aliases import tenant_of
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.core import BOTH, InstancePhase, Model, Role, Roles, StoreStatus
from torchrelay.scheduler.policy.reasons import Reason


def evict(
    demand: Demand, missing: Roles, autoscaler_input: AutoscalerInput, decided: Sequence[Action], config: PolicyConfig
) -> list[SetRoles | Drain]:
    """Drains that free as few slots as the model needs: one that plays all ``missing`` roles, else one for each.

    Nothing while a suitable slot is being freed already.
    """
    usable = _usable_workers(demand.model, autoscaler_input)
    emptied = {action.instance_id for action in decided if isinstance(action, Drain)}
    instances = [load.instance for load in autoscaler_input.loads]
    leaving = [one for one in instances if one.phase is InstancePhase.DRAINING or one.instance_id in emptied]
    if any(usable.get(instance.worker_id, frozenset()) >= missing for instance in leaving):
        return []
    idle = _idle_victims(demand.model, autoscaler_input)
    victims = [load for load in idle if load.instance.worker_id in usable and load.instance.instance_id not in emptied]
    if chosen := _min_victims(victims, missing, usable):
        return [_drain(load, "evict", "idle, and {} waits for a slot", demand.model) for load in chosen]
    # Busy models give up one slot at a time, so that two that wait for each other do not swap slots.
    if leaving or demand.oldest_wait_s < config.share_after_s:
        return []
    if shared := _share_slots(demand.model, missing, autoscaler_input, usable):
        return shared
    return _end_turn(demand, missing, autoscaler_input, usable, config)


def _usable_workers(model: Model, autoscaler_input: AutoscalerInput) -> dict[str, Roles]:
    """Workers that could take the model once idle and leaving instances are gone from their slot and arena, with the
    roles they can play.
    """
    idle = [load.instance.instance_id for load in _idle_victims(model, autoscaler_input)]
    held, leaving = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)  # packs, by host
    for load in autoscaler_input.loads:
        instance = load.instance
        goes = instance.phase is InstancePhase.DRAINING or instance.instance_id in idle
        (leaving if goes else held)[instance.host_id].add(instance.pack_id)
    stores = {host: _unpinned(store, leaving[host] - held[host]) for host, store in autoscaler_input.stores.items()}
    workers = (each for key, each in autoscaler_input.workers.items() if key not in autoscaler_input.suspects)
    slots = free_slots(model, workers, stores, frozenset())
    return {slot.worker_id: slot.playable_roles for slot in slots}


def _unpinned(store: StoreStatus, packs: set[str]) -> StoreStatus:
    unpinned = {pack_id: replace(store.copies[pack_id], num_pins=0) for pack_id in packs & store.copies.keys()}
    return replace(store, copies={**store.copies, **unpinned})


def _idle_victims(model: Model, autoscaler_input: AutoscalerInput) -> list[InstanceLoad]:
    """Instances of other models that no request uses or waits for, longest idle first."""
    needed = autoscaler_input.waited_for | {model.version_id}
    others = (load for load in autoscaler_input.loads if load.instance.staying)
    idle = [
        load for load in others if load.instance.version_id not in needed and load.is_idle_since(autoscaler_input.now)
    ]
    return sorted(idle, key=lambda load: (load.last_active, load.instance.instance_id))


def _min_victims(victims: Sequence[InstanceLoad], missing: Roles, usable: Mapping[str, Roles]) -> list[InstanceLoad]:
    for load in victims:
        if usable[load.instance.worker_id] >= missing:
            return [load]
    chosen: list[InstanceLoad] = []
    for role in sorted(missing):
        found = next((load for load in victims if role in usable[load.instance.worker_id] and load not in chosen), None)
        if found is None:
            return []
        chosen.append(found)
    return chosen


def _share_slots(
    model: Model, missing: Roles, autoscaler_input: AutoscalerInput, usable: Mapping[str, Roles]
) -> list[SetRoles | Drain]:
    """A model with several slots gives one up if the others cover its roles, or one of them can take both; or if it
    cannot serve with what it has anyway.

    The prefill instance goes first: its work ends soon, and decoding goes on undisturbed.
    """
    found: list[tuple[tuple[bool, bool, int, str], list[SetRoles | Drain]]] = []
    for version_id, loads in autoscaler_input.staying.items():
        for victim in loads if version_id != model.version_id else ():
            instance = victim.instance
            if instance.phase is not InstancePhase.READY or not usable.get(instance.worker_id, frozenset()) >= missing:
                continue
            drain = _drain(victim, "share", "{} waits for a slot, and this model can do without one", model)
            kept = _role_takeover(loads, victim, autoscaler_input, drain.reason)
            if kept is not None:
                cost = (bool(kept), instance.plays(Role.DECODE), victim.num_open, instance.instance_id)
                found.append((cost, [*kept, drain]))
    return min(found, key=lambda one: one[0])[1] if found else []


def _end_turn(
    demand: Demand, missing: Roles, autoscaler_input: AutoscalerInput, usable: Mapping[str, Roles], config: PolicyConfig
) -> list[SetRoles | Drain]:
    """More models are busy than there are slots: a model that waited a whole turn takes the slot held longest, if that
    was held for a whole turn too. Requests of the drained model wait for its next turn.
    """
    if demand.oldest_wait_s < config.turn_s:
        return []
    held = [
        load
        for load in sorted(autoscaler_input.loads, key=lambda load: (load.instance.since, load.instance.instance_id))
        if load.instance.version_id != demand.model.version_id
        and load.instance.phase is InstancePhase.READY
        and load.instance.since <= autoscaler_input.now - config.turn_s
        and load.instance.worker_id in usable
    ]
    waited = f"{{}} has waited {demand.oldest_wait_s:.0f} s, and no slot can be spared"
    return [_drain(load, "turn", waited, demand.model) for load in _min_victims(held, missing, usable)]


def _drain(victim: InstanceLoad, cause: str, text: str, waiting: Model) -> Drain:
    """``text`` names the waiting model as the victim's tenants may know it: they see why their own was drained."""
    name = waiting.name if victim.tenants == {tenant_of(waiting.name)} else "a model of another tenant"
    return Drain(victim.instance.instance_id, Reason(cause, text.format(name)))


def _role_takeover(
    loads: Sequence[InstanceLoad], victim: InstanceLoad, autoscaler_input: AutoscalerInput, reason: Reason
) -> list[SetRoles] | None:
    """What lets a model go on without ``victim``; None if nothing does."""
    rest = [load for load in loads if load is not victim]
    if cover_both_roles(load.instance for load in rest) or not cover_both_roles(load.instance for load in loads):
        return []
    for load in rest:
        worker = autoscaler_input.workers.get(load.instance.worker_id)
        ready = load.instance.phase is InstancePhase.READY and load.instance.takes_roles(autoscaler_input.now)
        if ready and worker is not None and worker.playable_roles >= BOTH:
            return [SetRoles(load.instance.instance_id, BOTH, reason)]
    return None
