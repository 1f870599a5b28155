"""From the state to a situation, and from what scaling decides to orders, commands and their reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torchrelay.scheduler import relaying
from torchrelay.scheduler.books import OpenAttempt
from torchrelay.scheduler.core import Instance, Model, Phase, Role, Roles
from torchrelay.scheduler.effects import Hop, LoadOrder, RolesCommand, UnloadCommand, WakeCommand
from torchrelay.scheduler.namesakes import tenant_of
from torchrelay.scheduler.scaling import decide
from torchrelay.scheduler.situation import Demand, Drain, Load, SetRoles, Situation, Wake
from torchrelay.scheduler.state import State

_UNLOAD_RETRY_S = 1.0


def scale(state: State, now: float) -> None:
    """Decides on the whole cluster and turns the decisions into commands."""
    for action in decide(situation(state, now), state.rules):
        match action:
            case Wake():
                _wake(state, action, now)
            case SetRoles():
                _set_roles(state, action, now)
            case Drain():
                _drain(state, action, now)


def situation(state: State, now: float) -> Situation:
    settled = now - state.started_at >= state.rules.settle_s
    loads = tuple(_load(state, instance) for instance in state.fleet)
    versions = set(state.queues.versions) | {instance.version_id for instance in state.fleet if instance.staying}
    models = [state.models[version_id] for version_id in sorted(versions) if version_id in state.models]
    return Situation(
        now=now,
        demands=tuple(_demand(state, model, now) for model in models) if settled else (),
        loads=loads,
        workers={
            worker_id: worker
            for worker_id, worker in state.view.workers.items()
            if not state.view.is_suspect(worker_id)
        },
        stores={store.host_id: store for store in state.view.stores.values()},
        idle_timeouts_s={model.version_id: state.idle_timeout_s(model.version_id, now) for model in models},
    )


def _load(state: State, instance: Instance) -> Load:
    worker = state.view.workers.get(instance.worker_id)
    reported = worker.num_running + worker.num_waiting if worker else 0
    names = state.namesakes.of(instance.version_id) or (instance.model,)
    return Load(instance, state.books.num_open(instance.instance_id), reported, frozenset(map(tenant_of, names)))


def _demand(state: State, model: Model, now: float) -> Demand:
    version_id = model.version_id
    instances = [instance for instance in state.fleet.of_version(version_id) if instance.staying]
    loading = [instance.instance_id for instance in instances if instance.phase is Phase.LOADING]
    cold = state.books.attempts_at(loading)
    return Demand(
        model=model,
        num_waiting=state.queues.num_waiting(version_id),
        num_cold=len(cold),
        oldest_wait_s=state.queues.oldest_wait_s(version_id, now),
        backlog_s=_backlog_s(state, instances),
        not_before=state.failures.not_before(version_id),
        avoid=state.failures.avoid(version_id, now),
        of_tenants=_of_tenants(state, version_id, cold),
    )


def _of_tenants(state: State, version_id: str, cold: Iterable[OpenAttempt]) -> dict[str, tuple[int, int]]:
    """How many requests of each tenant wait, and are placed on what still loads; nothing where there is one tenant."""
    tenants = {tenant_of(name) for name in state.namesakes.of(version_id)}
    if len(tenants) < 2:
        return {}
    num_waiting = Counter(tenant_of(admission.model) for admission in state.queues.waiting(version_id))
    num_cold = Counter(tenant_of(attempt.admission.model) for attempt in cold)
    return {tenant: (num_waiting[tenant], num_cold[tenant]) for tenant in tenants}


def _backlog_s(state: State, instances: Sequence[Instance]) -> float:
    """Prompts queued at the instances, in seconds of one instance at the rate measured."""
    backlog_s = 0.0
    for instance in instances:
        worker = state.view.workers.get(instance.worker_id)
        if worker and worker.prefill_tokens_per_s and instance.plays(Role.PREFILL):
            latency = state.latencies.of(worker, instance.pack_id, state.rules)
            backlog_s += state.queue_s(instance, latency)
    return backlog_s


def _wake(state: State, action: Wake, now: float) -> None:
    model = action.model
    orders: dict[str, list[LoadOrder]] = {}  # by host, in the order assigned
    for assignment in action.assignments:
        worker = state.view.workers[assignment.worker_id]
        instance = Instance(
            instance_id=state.new_id(),
            model=model.name,
            version_id=model.version_id,
            pack_id=model.pack_id,
            worker_id=worker.worker_id,
            incarnation=worker.incarnation,
            host_id=worker.host_id,
            roles=assignment.roles,
            phase=Phase.LOADING,
            since=now,
            created_at=now,
            last_active=now,
            reason=action.reason,
            error_before=worker.slot.error,
        )
        state.fleet.put(instance)
        order = LoadOrder(instance.instance_id, worker.worker_id, assignment.roles)
        orders.setdefault(worker.host_id, []).append(order)
        state.happened(now, "wake", instance, action.reason, "instance.loading", about(instance))
    stores = {host_id: store for host_id in orders if (store := state.view.store_of(host_id))}
    store_ids = [store.store_id for store in stores.values()]
    arrows = relaying.draw(state, model.pack_id, model.pack_bytes, store_ids, now, reason=action.reason)
    by_store = {stores[host_id].store_id: tuple(loads) for host_id, loads in orders.items()}
    waiting = state.queues.waiting(model.version_id)
    hops = tuple(Hop(arrow.target, arrow.sources, by_store[arrow.target], arrow.num_striped) for arrow in arrows)
    state.effects.commands.append(WakeCommand(model, hops, waiting[0].traceparent if waiting else ""))
    chain = ", ".join(map(str, arrows))
    num = len(action.assignments)
    state.happened(now, "plan", model, chain)
    state.happened(now, "scale_up", model, action.reason, "scale.up", {"num_instances": num, "relay": chain})


def _set_roles(state: State, action: SetRoles, now: float) -> None:
    instance = state.fleet.get(action.instance_id)
    assert instance is not None
    state.fleet.put(replace(instance, pending_roles=action.roles))
    state.effects.commands.append(RolesCommand(instance.instance_id, instance.worker_id, action.roles))
    fields = about(instance) | {"roles": role_names(action.roles)}
    state.happened(now, "set_roles", instance, action.reason, "scale.set_roles", fields)


def _drain(state: State, action: Drain, now: float) -> None:
    instance = state.fleet.get(action.instance_id)
    assert instance is not None
    drained = replace(instance, phase=Phase.DRAINING, since=now, reason=action.reason)
    state.fleet.put(drained)
    _unload(state, drained)
    fields = about(instance) | {"in_state_s": now - instance.since}
    kind = action.reason.cause
    state.happened(now, "drain", instance, action.reason, "instance.draining", fields)
    state.happened(now, kind, instance, action.reason, f"scale.{_SCALE_EVENT[kind]}", about(instance))


_SCALE_EVENT = {"idle": "down", "cancel": "down", "evict": "evict", "share": "share", "turn": "share"}


def _unload(state: State, instance: Instance) -> None:
    state.effects.commands.append(UnloadCommand(instance.instance_id, instance.worker_id, state.rules.drain_s))


def unload_failed(state: State, instance_id: str, now: float) -> None:
    """The worker did not answer; it is asked again for as long as it reports the instance."""
    instance = state.fleet.get(instance_id)
    if instance is not None and instance.phase is Phase.DRAINING:
        state.fleet.put(replace(instance, unload_retry_at=now + _UNLOAD_RETRY_S))


def retry_unloads(state: State, now: float) -> None:
    for instance in list(state.fleet):
        if instance.unload_retry_at is not None and instance.unload_retry_at <= now:
            state.fleet.put(replace(instance, unload_retry_at=None))
            _unload(state, instance)


def role_names(roles: Roles) -> str:
    return ",".join(role.name.lower() for role in sorted(roles))


def about(instance: Instance) -> dict[str, str | int | float]:
    return {
        "instance_id": instance.instance_id,
        "version_id": instance.version_id,
        "pack_id": instance.pack_id,
        "worker_id": instance.worker_id,
        "host_id": instance.host_id,
        "roles": role_names(instance.roles),
    }
