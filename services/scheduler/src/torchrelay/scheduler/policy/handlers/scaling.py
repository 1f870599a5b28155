"""Runs the autoscaler on the state, and turns its actions into commands and events."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from torchrelay.common.quantities import format_count
from torchrelay.scheduler.policy.autoscaling.actions import FIRST_SLOT, Action, Drain, Load, SetRoles
from torchrelay.scheduler.policy.autoscaling.load_failures import LOAD_STALLED
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.config import ScalingMode
from torchrelay.scheduler.policy.demand.usage import Usage
from torchrelay.scheduler.policy.dispatch import recalls
from torchrelay.scheduler.policy.effects import Hop, LoadCommand, LoadOrder, SetRolesCommand, UnloadCommand
from torchrelay.scheduler.policy.handlers import demands, relay_plans
from torchrelay.scheduler.policy.handlers.views import view_of
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.storage_tiers import Tier, tier_of
from torchrelay.scheduler.policy.types import (
    BOTH,
    InstancePhase,
    Model,
    Role,
    Roles,
    SlotClass,
    StoreStatus,
    WorkerStatus,
)

LOAD_REFUSED = "load_refused"
_UNLOAD_RETRY_S = 1.0
_ADVISE_AGAIN_S = 60.0  # advice that still stands is recorded again after this time
_LEAD_FACTOR = 1.5  # a scheduled instance is loaded this many predicted load times early: some loads take longer
_SCALE_EVENTS = {"idle": "down", "cancel": "down", "evict": "evict"} | dict.fromkeys(
    ("preempt_spare", "time_slice", FIRST_SLOT), "preempt"
)


def scale(state: State, now: float, version_ids: Iterable[str] | None = None) -> None:
    """Decides for the whole cluster or for these versions, and issues the commands."""
    for action in state.strategies.decide(view_of(state, now, version_ids)):
        if state.config.scaling is ScalingMode.ADVISE and not _is_for_minimum(state, action):
            _advise(state, action, now)
            continue
        match action:
            case Load():
                _load(state, action, now)
            case SetRoles():
                _set_roles(state, action, now)
            case Drain():
                _drain(state, action, now)


def _is_for_minimum(state: State, action: Action) -> bool:
    """Whether the action loads a model that has fewer instances than its minimum."""
    if not isinstance(action, Load):
        return False
    version_id = action.model.version_id
    minimum = state.minimums.in_force.get(version_id)
    num_staying = sum(instance.staying for instance in state.instances.of_version(version_id))
    return minimum is not None and num_staying < minimum.number


def _advise(state: State, action: Action, now: float) -> None:
    """Records the action instead of carrying it out: at once, and again from time to time while it stands."""
    if isinstance(action, Load):
        subject: Instance | Model = action.model
        what = f"would load {format_count(len(action.assignments), 'instance')}"
        key = action.model.version_id
    else:
        instance = state.instances.get(action.instance_id)
        if instance is None:
            return
        subject, key = instance, action.instance_id
        what = "would drain" if isinstance(action, Drain) else f"would play {role_names(action.roles)}"
    asked = key, action.reason.cause
    if now - state.advised_at.get(asked, -math.inf) < _ADVISE_AGAIN_S:
        return
    state.advised_at[asked] = now
    by_tenant = {tenant: f"{what}: {text}" for tenant, text in action.reason.by_tenant.items()}
    reason = replace(action.reason, text=f"{what}: {action.reason.text}", by_tenant=by_tenant)
    state.record_event(now, "advise", subject, reason, "scale.advice")


def may_act_alone(state: State, model: Model, now: float) -> bool:
    """Whether a decision on this model alone may act now. If other versions have waiting requests, only a version that
    lacks a role may: a version that only grows is decided together with the others, in each round.
    """
    return not state.queues.others_wait(model.version_id) or _lacks_role(state, model, now)


def has_waiting_or_minimum(state: State, version_id: str) -> bool:
    """Whether requests wait or minimums apply. If neither, the version is rescaled at its next scheduled evaluation."""
    return bool(state.queues.num_waiting(version_id)) or version_id in state.minimums.in_force


def mark(state: State, version_ids: Iterable[str], now: float) -> None:
    """Notes versions to decide on at once, but after the inputs that have come with this one."""
    state.marked.update(version_ids)
    if state.marked or state.are_starving_marked:
        state.marked_at = min(state.marked_at, now)


def mark_starving(state: State, now: float) -> None:
    """Notes all versions with waiting requests that lack a role for any of them by then."""
    state.are_starving_marked = bool(len(state.queues))
    mark(state, (), now)


def scale_marked(state: State, now: float) -> Sequence[str]:
    """Decides on the marked versions, and returns them."""
    marked = state.marked
    if state.are_starving_marked:
        models = map(state.versions.model, state.queues.versions)
        marked.update(model.version_id for model in models if model is not None and _lacks_role(state, model, now))
    state.marked, state.marked_at, state.are_starving_marked = set(), math.inf, False
    if marked:
        scale(state, now, sorted(marked))
    return sorted(marked)


def _lacks_role(state: State, model: Model, now: float) -> bool:
    """Whether the version lacks a role, as defined by ``View.missing``."""
    kv_bytes = demands.waiting_of(state, model, now).most_kv_bytes
    played: set[Role] = set()
    for instance in state.instances.of_version(model.version_id):
        worker = state.membership.workers.get(instance.worker_id)
        if instance.staying and not (worker is not None and worker.kv_pool_bytes < kv_bytes):
            played |= instance.target_roles
            if played >= BOTH:
                return False
    return True


def idle_versions(state: State, now: float) -> list[str]:
    """Versions that may have become idle just now."""
    idle = []
    for version_id in state.idle_deadlines.passed(now):
        instances = state.instances.of_version(version_id)
        used_at = max((instance.last_active for instance in instances), default=-math.inf)
        if (deadline := used_at + state.keep_s(version_id, now)) > now:
            state.idle_deadlines.note(version_id, deadline)
        elif instances:
            idle.append(version_id)
    return idle


def note_model(state: State, model: Model, now: float, *, is_new_call: bool) -> None:
    """Stores the newest settings of a version, whose instances leave slots in which it does not run any more.
    ``is_new_call``: see ``VersionAliases.note``.
    """
    state.note_model(model, now, is_new_call=is_new_call)
    leave_other_slots(state, (model.version_id,), now)


def leave_other_slots(state: State, version_ids: Iterable[str], now: float) -> None:
    """Drains instances in slots without the engine, the devices or the labels that their model names, if a slot with
    them is present.
    """
    for version_id in version_ids:
        model = state.versions.model(version_id)
        if model is None or model.slot_class == SlotClass():
            continue
        for instance in state.instances.of_version(version_id):
            worker = state.membership.workers.get(instance.worker_id)
            if not instance.staying or worker is None or model.slot_class.fits(worker):
                continue
            if not state.membership.sizes.present(model.slot_class):
                break
            text = f"it runs with {_slot_text(worker)}, and its model needs {_slot_text(model)} now"
            if model.slot_class._replace(labels=frozenset()).fits(worker):  # tenants do not read each other's labels
                text = "its host lacks labels that its model needs now"
            drain(state, instance, Reason("other_engine", text), now)


def _slot_text(slot: WorkerStatus | Model) -> str:
    return f"{slot.engine or 'any engine'} on {format_count(slot.num_devices, 'device')}"


def set_minimums(state: State, models: Sequence[Model], now: float) -> Collection[str]:
    """Sets the models that have a minimum of instances, always or at times; no other model has one. Returns the
    versions whose minimum has changed.
    """
    for model in models:
        note_model(state, model, now, is_new_call=False)
    state.minimums.set(models)
    return evaluate_minimums(state, now)


def model_deleted(state: State, name: str, now: float) -> None:
    """Forgets the demand for versions that no other model shares; their instances are drained once they are idle."""
    for version in state.versions:
        if not version.aliases.delete(name):
            continue
        state.tenant_slots.changed(version.version_id)
        if version.aliases.is_deleted:
            version.usage = Usage()
            state.forecasts.pop(version.version_id, None)
            state.idle_deadlines.note(version.version_id, now)


def evaluate_minimums(state: State, now: float) -> Collection[str]:
    """Updates the minimums in force now, and records each change; returns the versions with a change."""

    def lead_s(model: Model) -> float:
        return _LEAD_FACTOR * state.expected_load_s(model) + state.config.whole_scale_every_s

    changed = state.minimums.evaluate(now, lead_s)
    for version_id, minimum in changed.items():
        if model := state.versions.model(version_id):
            plain = dict.fromkeys(demands.tenants_of(state, version_id), minimum.plain_text)
            state.record_event(now, "minimum", model, Reason("minimum", minimum.text(now), {}, plain))
    return changed.keys()


def _tier(state: State, model: Model, store: StoreStatus) -> Tier:
    return tier_of(model.pack_id, store, state.membership.is_held(model.pack_id))


def _load(state: State, action: Load, now: float) -> None:
    model = action.model
    orders = defaultdict[str, list[LoadOrder]](list)  # by host, in the order assigned
    for assignment in action.assignments:
        worker = state.membership.workers[assignment.worker_id]
        instance = Instance(
            instance_id=state.new_id(),
            model=model.name,
            version_id=model.version_id,
            pack_id=model.pack_id,
            worker_id=worker.worker_id,
            incarnation=worker.incarnation,
            host_id=worker.host_id,
            roles=assignment.roles,
            phase=InstancePhase.LOADING,
            since=now,
            created_at=now,
            reason=action.reason,
            error_before=worker.slot.error,
        )
        state.instances.put(instance)
        orders[worker.host_id].append(LoadOrder(instance.instance_id, worker.worker_id, assignment.roles))
        state.record_event(now, "load", instance, action.reason, "instance.loading", event_fields(instance))
    stores = {host_id: store for host_id in orders if (store := state.membership.store_of(host_id))}
    store_ids = [store.store_id for store in stores.values()]
    waiting = state.queues.waiting(model.version_id)
    edges = relay_plans.plan_relay(state, model.pack_id, model.pack_bytes, store_ids, now, reason=action.reason)
    for edge in edges:
        host_id = state.membership.stores[edge.target].host_id
        tier = _tier(state, model, stores[host_id])
        links = frozenset[str]() if tier is Tier.HOST else frozenset((edge.target, *edge.striped))
        for order in orders[host_id]:
            state.load_times.begin(order.instance_id, model, tier, links)
    by_store = {stores[host_id].store_id: tuple(loads) for host_id, loads in orders.items()}
    hops = tuple(
        Hop(
            edge.target,
            edge.sources,
            by_store[edge.target],
            edge.num_striped,
            relay_plans.goes_first(state, model.pack_id, edge.target),
        )
        for edge in edges
    )
    state.effects.commands.append(LoadCommand(model, hops, waiting[0].traceparent if waiting else ""))
    chain = ", ".join(map(str, edges))
    num = len(action.assignments)
    state.record_event(now, "plan", model, chain)
    state.record_event(now, "scale_up", model, action.reason, "scale.up", {"num_instances": num, "relay": chain})


def _set_roles(state: State, action: SetRoles, now: float) -> None:
    instance = state.instances.get(action.instance_id)
    assert instance is not None
    lost = instance.roles - action.roles
    instance.pending_roles, instance.roles_since, instance.roles_reason = action.roles, now, action.reason.text
    state.instances.put(instance)
    state.effects.commands.append(SetRolesCommand(instance.instance_id, instance.worker_id, action.roles))
    fields = event_fields(instance) | {"roles": role_names(action.roles)}
    state.record_event(now, "set_roles", instance, action.reason, "scale.set_roles", fields)
    if lost:
        _note_role_lost(state, instance.version_id, lost, now)
        recalls.recall_from_roles(state, instance, lost, now)


def _drain(state: State, action: Drain, now: float) -> None:
    instance = state.instances.get(action.instance_id)
    assert instance is not None
    drain(state, instance, action.reason, now)
    if action.overdue_tenant:
        since = now - state.config.time_slice_s
        recent = {tenant: at for tenant, at in state.overdue_slots_at.items() if at > since}
        state.overdue_slots_at = {**recent, action.overdue_tenant: now}
    if instance.target_roles != BOTH:
        _note_role_lost(state, instance.version_id, instance.target_roles, now)
    kind = action.reason.cause
    state.record_event(now, kind, instance, action.reason, f"scale.{_SCALE_EVENTS[kind]}", event_fields(instance))


def _note_role_lost(state: State, version_id: str, roles: Roles, now: float) -> None:
    """Records that the version gives up an instance with this role: the next needs another full period without
    demand.
    """
    history = state.versions.of(version_id).usage
    if Role.DECODE in roles:
        history.decode_last_full_at = now
    else:
        history.last_full_at = now


def drain(state: State, instance: Instance, reason: Reason, now: float) -> None:
    """Starts to drain the instance: it takes no more requests and leaves its slot when its attempts have ended."""
    fields = event_fields(instance) | {"in_state_s": now - instance.since}
    instance.phase, instance.since, instance.reason = InstancePhase.DRAINING, now, reason
    instance.names_at_drain = state.names_of(instance.version_id)
    instance.unload_retry_at = now + state.config.longest_drain_s
    state.instances.put(instance)
    _unload(state, instance, now)
    state.record_event(now, "drain", instance, reason, "instance.draining", fields)


def _unload(state: State, instance: Instance, now: float) -> None:
    # Requests that wait for weights that do not come are served sooner elsewhere; a drain that overran gets no more
    # time.
    has_overrun = now - instance.since >= state.config.longest_drain_s
    is_urgent = instance.reason.cause in (LOAD_STALLED, LOAD_REFUSED, FIRST_SLOT)
    drain_s = 0.0 if has_overrun or is_urgent else state.config.drain_s
    state.effects.commands.append(UnloadCommand(instance.instance_id, instance.worker_id, drain_s))


def unload_failed(state: State, instance_id: str, now: float) -> None:
    """Schedules a retry of an unload that the worker did not answer, as long as the worker reports the instance."""
    instance = state.instances.get(instance_id)
    if instance is not None and instance.phase is InstancePhase.DRAINING:
        instance.unload_retry_at = now + _UNLOAD_RETRY_S


def retry_unloads(state: State, now: float) -> None:
    """Retries unloads of workers that did not respond, and of workers whose slot should be free by now."""
    for instance in state.instances.draining:
        if instance.unload_retry_at is not None and instance.unload_retry_at <= now:
            instance.unload_retry_at = now + state.config.longest_drain_s
            _unload(state, instance, now)


def role_names(roles: Roles) -> str:
    return ",".join(role.name.lower() for role in sorted(roles))


def event_fields(instance: Instance) -> dict[str, str | int | float]:
    return {
        "instance_id": instance.instance_id,
        "version_id": instance.version_id,
        "pack_id": instance.pack_id,
        "worker_id": instance.worker_id,
        "host_id": instance.host_id,
        "roles": role_names(instance.roles),
    }
