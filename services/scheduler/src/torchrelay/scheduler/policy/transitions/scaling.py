"""Builds the autoscaler's input from the state, and turns its actions into commands and events."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

from torchrelay.scheduler.policy.autoscaling.autoscaler_input import (
    AutoscalerInput,
    Demand,
    Drain,
    InstanceLoad,
    Loads,
    SetRoles,
    Wake,
)
from torchrelay.scheduler.policy.cluster.slot_sizes import largest_pool
from torchrelay.scheduler.policy.cluster.storage_tiers import Tier, tier_of
from torchrelay.scheduler.policy.cluster.version_aliases import tenant_of
from torchrelay.scheduler.policy.core import (
    BOTH,
    ROLES,
    Instance,
    InstancePhase,
    Model,
    Role,
    Roles,
    StoreStatus,
    WorkerStatus,
)
from torchrelay.scheduler.policy.dispatch.open_attempts import BoundWork, OpenAttempt
from torchrelay.scheduler.policy.effects import Hop, LoadOrder, SetRolesCommand, UnloadCommand, WakeCommand
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.transitions import backlogs, decode_work, relays

LOAD_STALLED, LOAD_REFUSED = "load_stalled", "load_refused"
_UNLOAD_RETRY_S = 1.0
_LEAD_FACTOR = 1.5  # so many predicted load times before its begin, a scheduled instance is loaded: some take longer
_SCALE_EVENTS = {"idle": "down", "cancel": "down", "evict": "evict", "share": "share", "turn": "share"}


def scale(state: State, now: float, version_ids: Iterable[str] | None = None) -> None:
    """Turns decisions into commands: on the whole cluster, or on what these versions need."""
    is_complete = version_ids is None
    decide = state.strategies.decide
    for action in decide(autoscaler_input(state, now, version_ids), state.config, is_complete=is_complete):
        match action:
            case Wake():
                _wake(state, action, now)
            case SetRoles():
                _set_roles(state, action, now)
            case Drain():
                _drain(state, action, now)


def may_act_alone(state: State, model: Model, now: float) -> bool:
    """Whether a decision on this model alone may do anything now: one that plays both roles at most grows, and that is
    decided with all that requests wait for. These are looked at with each tick.
    """
    if not state.strategies.decides_in_turns or not state.queues.others_wait(model.version_id):
        return True
    return _lacks_role(state, model, now)


def has_waiting_or_minimum(state: State, version_id: str) -> bool:
    """Else what it has too many or too few of is decided in its turn."""
    return bool(state.queues.num_waiting(version_id)) or version_id in state.minimums.in_force


def starving_versions(state: State, now: float) -> list[str]:
    """Those that requests wait for, and that lack a role for any of these."""
    models = [state.models[version_id] for version_id in state.queues.versions if version_id in state.models]
    return [model.version_id for model in models if _lacks_role(state, model, now)]


def _lacks_role(state: State, model: Model, now: float) -> bool:
    """As ``AutoscalerInput.missing`` says it."""
    kv_bytes = _waiting(state, model, now).most_kv_bytes
    played: set[Role] = set()
    for instance in state.instances.of_version(model.version_id):
        worker = state.membership.workers.get(instance.worker_id)
        if instance.staying and not (worker is not None and worker.kv_pool_bytes < kv_bytes):
            played |= instance.target_roles
            if played >= BOTH:
                return False
    return True


def idle_versions(state: State, now: float) -> list[str]:
    """Those that may have become idle just now."""
    idle = []
    for version_id in state.idle_deadlines.take(now):
        instances = state.instances.of_version(version_id)
        used_at = max((state.instances.last_active(one.instance_id) for one in instances), default=-math.inf)
        if (deadline := used_at + state.longest_idle_s(version_id, now)) > now:
            state.idle_deadlines.note(version_id, deadline)
        elif instances:
            idle.append(version_id)
    return idle


def autoscaler_input(state: State, now: float, version_ids: Iterable[str] | None = None) -> AutoscalerInput:
    membership, settled = state.membership, now - state.started_at >= state.config.settle_s
    if version_ids is None:
        staying = {instance.version_id for instance in state.instances if instance.staying}
        version_ids = sorted(
            staying.union(state.queues.versions, state.minimums.in_force, expected_versions(state, now))
        )
    version_ids = list(version_ids)
    models = [state.models[version_id] for version_id in version_ids if version_id in state.models]
    prices_s = {version_id: state.idle_timeout_s(version_id, now) for version_id in version_ids}
    settled_models = models if settled else ()
    demands = {one.version_id: _demand(state, one, prices_s[one.version_id], now) for one in settled_models}
    for demand in demands.values():
        _note_demand(state, demand, now)

    @cache
    def demand_of(version_id: str) -> Demand | None:
        if version_id in demands:
            return demands[version_id]
        model = state.models.get(version_id)
        return None if model is None else _demand(state, model, state.idle_timeout_s(version_id, now), now)

    loads = _InstanceLoads(state, now)
    return AutoscalerInput(
        now=now,
        demands=tuple(demands.values()),
        instance_loads=Loads(loads.of_version, loads.of_all, loads.unused, state.instances.workers),
        workers=membership.workers,
        free_workers=membership.free_workers,
        stores=membership.stores_by_host,
        prices_s=prices_s,
        version_ids=version_ids,
        waited_for=frozenset(state.queues.versions) if settled else frozenset(),
        suspects=membership.suspects,
        minimums=state.minimums.in_force,
        holders_of=membership.holders,
        overdue_slots_at=state.overdue_slots_at,
        demand_of=demand_of,
    )


def set_minimums(state: State, models: Sequence[Model], now: float) -> None:
    """These models have a minimum of instances, always or at times, and no other has."""
    for model in models:
        state.note_model(model, now, is_new_call=False)
    state.minimums.set(models)
    evaluate_minimums(state, now)


def model_deleted(state: State, name: str, now: float) -> None:
    """Where no other model has its version, nobody is expected to ask for that again, and its instances go as soon as
    no request is open there.
    """
    for version_id in state.aliases.deleted(name):
        state.forecasts.pop(version_id, None)
        state.arrivals.forget(version_id)
        state.idle_deadlines.note(version_id, now)


def evaluate_minimums(state: State, now: float) -> None:
    """The minimums of this moment; each that is another than before is told."""

    def lead_s(model: Model) -> float:
        tier = Tier.PEER if state.membership.is_held(model.pack_id) else Tier.REMOTE
        return _LEAD_FACTOR * state.load_times.by_tier(model, state.config)[tier] + state.config.whole_scale_every_s

    for version_id, minimum in state.minimums.evaluate(now, lead_s).items():
        if model := state.models.get(version_id):
            plain = dict.fromkeys(_tenants(state, version_id), minimum.plain_text)
            state.happened(now, "minimum", model, Reason("minimum", minimum.text(now), {}, plain))


def expected_versions(state: State, now: float) -> list[str]:
    """Those of which the next request is expected about now."""
    for version_id, (_, until) in list(state.forecasts.items()):
        if until < now:
            del state.forecasts[version_id]
    return [version_id for version_id, (begin, _) in state.forecasts.items() if begin <= now]


class _InstanceLoads:
    """The instances as one decision sees them; each version is looked at once."""

    def __init__(self, state: State, now: float) -> None:
        self._state, self._now = state, now
        self._found: dict[str, tuple[InstanceLoad, ...]] = {}
        self._versions: dict[str, _Version] = {}

    def of_version(self, version_id: str) -> tuple[InstanceLoad, ...]:
        found = self._found.get(version_id)
        if found is None:
            found = self._found[version_id] = tuple(map(self._load, self._state.instances.of_version(version_id)))
        return found

    def of_all(self) -> tuple[InstanceLoad, ...]:
        """In the order in which they came."""
        instances = self._state.instances
        by_id = {
            load.instance.instance_id: load for version_id in instances.versions for load in self.of_version(version_id)
        }
        return tuple(by_id[one.instance_id] for one in instances)

    def unused(self) -> tuple[InstanceLoad, ...]:
        """Without open attempts."""
        bound = self._state.attempts.bound
        return tuple(self._load(one) for one in self._state.instances if one.instance_id not in bound)

    def _load(self, instance: Instance) -> InstanceLoad:
        state, now = self._state, self._now
        version = self._versions.get(instance.version_id)
        if version is None:
            version = self._versions[instance.version_id] = _version(state, instance.version_id, now)
        instance_id, worker = instance.instance_id, state.membership.workers.get(instance.worker_id)
        work, last_active = state.attempts.at(instance_id), state.instances.last_active(instance_id)
        # What a worker counts long after the last attempt is of requests that nobody has: they would keep its slot for
        # ever.
        is_counted = worker is not None and now - last_active <= state.config.drain_s
        is_ready = instance.phase is InstancePhase.READY
        return InstanceLoad(
            instance,
            work.num_open,
            worker.num_running if worker is not None and is_counted else 0,
            last_active,
            # From host memory, where its weights stay: no longer than it took to load, wherever they came from.
            min(version.reload_s, instance.since - instance.created_at) if is_ready else 0.0,
            version.tenants or frozenset((tenant_of(instance.model),)),
            version.arrivals_per_s,
            version.target_s,
            partial(_drain_s, state, instance, worker, work),
        )


class _Version(NamedTuple):
    """What the instances of a version have in common."""

    tenants: frozenset[str]
    reload_s: float
    arrivals_per_s: float
    target_s: float


def _version(state: State, version_id: str, now: float) -> _Version:
    model, history = state.models.get(version_id), state.arrivals.of(version_id)
    return _Version(
        frozenset(map(tenant_of, state.aliases.of(version_id))),
        state.load_times.by_tier(model, state.config)[Tier.HOST] if model is not None else 0.0,
        history.expected_per_s(now),
        history.target_s or state.config.standard_ttft_s,
    )


def _drain_s(state: State, instance: Instance, worker: WorkerStatus | None, work: BoundWork) -> float:
    """Until the answers that run there have ended: the longest has twice the mean left, if that is known."""
    if not work.num_choices or worker is None:
        return 0.0
    tbt_s = state.latency_models.of(worker, instance.pack_id, state.config).tbt_s(work.num_choices, work.num_attended)
    num_tokens = state.answer_lengths.mean(instance.version_id) or 0.0
    return min(2 * num_tokens * tbt_s, state.config.drain_s)


def _demand(state: State, model: Model, price_s: float, now: float) -> Demand:
    version_id = model.version_id
    instances = [instance for instance in state.instances.of_version(version_id) if instance.staying]
    loading = [instance.instance_id for instance in instances if instance.phase is InstancePhase.LOADING]
    cold = state.attempts.attempts_at(loading)
    waiting = _waiting(state, model, now)
    history = state.arrivals.of(version_id)
    rate, late_since = history.rate(now), max([now - price_s, *(one.since for one in instances)])
    load_s = state.load_times.by_tier(model, state.config)
    idle_plan = history.idle_gaps.plan(price_s, load_s[Tier.PEER])
    backlog_s = backlogs.backlog_s(state, model, now, waiting.num_too_large_tokens)
    decode = decode_work.decode_demand(state, model, instances, waiting.number, price_s, now)
    if decode is not None and waiting.number:
        num_tokens = state.queues.num_prefill_tokens(version_id) - waiting.num_too_large_tokens
        held_up = decode_work.num_held_up(state, model, decode, now) / waiting.number
        backlog_s -= min(held_up, 1.0) * backlogs.prompts_s(state, model, num_tokens, now)
    demand = Demand(
        model=model,
        num_waiting=waiting.number,
        num_cold=len(cold),
        oldest_wait_s=waiting.oldest_s,
        slotless_s=now - state.slot_lost_at[version_id] if version_id in state.slot_lost_at else math.inf,
        backlog_s=max(backlog_s, 0.0),
        not_before=state.load_failures.not_before(version_id),
        avoid=state.load_failures.avoid(now),
        most_kv_bytes=waiting.most_kv_bytes,
        least_kv_bytes=waiting.least_kv_bytes,
        by_tenant=_of_tenants(state, version_id, cold),
        arrivals_per_s=rate.requests_per_s,
        num_late_before=0 if loading else history.num_late(late_since),
        load=backlogs.prompts_s(state, model, rate.tokens_per_s, now),
        target_s=history.target_s or state.config.standard_ttft_s,
        price_s=price_s,
        keep_s=min(idle_plan.keep_s, state.longest_idle_s(version_id, now)),
        is_deleted=state.aliases.is_deleted(version_id),
        forecast=history.forecast(idle_plan),
        load_s=load_s,
        crowded_at=history.crowded_at,
        decode=decode,
    )
    playing = Counter(role for one in instances for role in one.target_roles)
    if decode is not None and playing[Role.DECODE] > 1 and decode.num_saved(playing[Role.DECODE] - 1, 0.0) >= 1:
        demand = replace(demand, decode=replace(decode, crowded_at=now))
    num_serving = playing[Role.PREFILL] if decode is not None else min(playing[role] for role in ROLES)
    if num_serving < 2:
        return demand
    lanes = (state.attempts.at(one.instance_id).lane for one in instances)
    num_stuck = sum(lane.overdue_s(now) > state.config.take_back_gain_s for lane in lanes)  # these may compute nothing
    num_able = num_serving - num_stuck
    if num_able < 2 or demand.num_saved(num_able - 1, 0.0) >= 1:
        return replace(demand, crowded_at=now)
    return demand


def _note_demand(state: State, demand: Demand, now: float) -> None:
    """What later decisions are to know of it."""
    version_id = demand.model.version_id
    if now < demand.forecast[1] < math.inf:
        state.forecasts[version_id] = demand.forecast
    history = state.arrivals.of(version_id)
    history.crowded_at = demand.crowded_at
    if demand.decode is not None:
        history.decode_crowded_at = demand.decode.crowded_at


def _tier(state: State, model: Model, store: StoreStatus) -> Tier:
    return tier_of(model.pack_id, store, state.membership.is_held(model.pack_id))


@dataclass(frozen=True)
class _Waiting:
    """The requests of a model that slots can help: too large for each that is there, they wait for another worker."""

    number: int = 0
    oldest_s: float = 0.0
    most_kv_bytes: int = 0
    least_kv_bytes: int = 0
    num_too_large_tokens: int = 0  # of the prompts left out


def _waiting(state: State, model: Model, now: float) -> _Waiting:
    version_id, sizes = model.version_id, state.membership.sizes
    if not state.queues.num_waiting(version_id):
        return _Waiting()
    slots = sizes.since(now - state.config.unserved_resumed_s, model.num_devices)
    pools = {slot.kv_pool_bytes for slot in slots if slot.kv_pool_bytes}
    if len(pools) <= 1:  # as usual: the slots that hold any request hold each
        return _Waiting(state.queues.num_waiting(version_id), state.queues.oldest_wait_s(version_id, now))
    largest = largest_pool(sizes.present(model.num_devices))
    waiting = state.queues.waiting(version_id)
    fit = [one for one in waiting if one.kv_bytes(model) <= largest]
    num_left_out = sum(one.num_prefill_tokens for one in waiting) - sum(one.num_prefill_tokens for one in fit)
    if not fit:
        return _Waiting(num_too_large_tokens=num_left_out)
    needs = [one.kv_bytes(model) for one in fit]
    return _Waiting(len(fit), now - min(one.admitted_at for one in fit), max(needs), min(needs), num_left_out)


def _of_tenants(state: State, version_id: str, cold: Iterable[OpenAttempt]) -> dict[str, tuple[int, int]]:
    """Requests of each tenant that wait, and that are placed on loading instances; empty for a single tenant."""
    tenants = _tenants(state, version_id)
    if not tenants:
        return {}
    num_cold = Counter(tenant_of(attempt.admission.model) for attempt in cold)
    return {tenant: (state.queues.num_of_tenant(version_id, tenant), num_cold[tenant]) for tenant in tenants}


def _tenants(state: State, version_id: str) -> list[str]:
    """Who shares the version; empty for a single tenant."""
    tenants = sorted({tenant_of(name) for name in state.aliases.of(version_id)})
    return tenants if len(tenants) > 1 else []


def _wake(state: State, action: Wake, now: float) -> None:
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
        store = state.membership.store_of(worker.host_id)
        if store is not None:
            state.load_times.begin(instance.instance_id, model, _tier(state, model, store))
        orders[worker.host_id].append(LoadOrder(instance.instance_id, worker.worker_id, assignment.roles))
        state.happened(now, "wake", instance, action.reason, "instance.loading", event_fields(instance))
    stores = {host_id: store for host_id in orders if (store := state.membership.store_of(host_id))}
    store_ids = [store.store_id for store in stores.values()]
    waiting = state.queues.waiting(model.version_id)
    deadline = min((admission.deadline for admission in waiting), default=now)
    edges = relays.plan_relay(
        state, model.pack_id, model.pack_bytes, store_ids, now, deadline=deadline, reason=action.reason
    )
    by_store = {stores[host_id].store_id: tuple(loads) for host_id, loads in orders.items()}
    hops = tuple(
        Hop(
            edge.target,
            edge.sources,
            by_store[edge.target],
            edge.num_striped,
            relays.goes_first(state, model.pack_id, edge.target),
        )
        for edge in edges
    )
    state.effects.commands.append(WakeCommand(model, hops, waiting[0].traceparent if waiting else ""))
    chain = ", ".join(map(str, edges))
    num = len(action.assignments)
    state.happened(now, "plan", model, chain)
    state.happened(now, "scale_up", model, action.reason, "scale.up", {"num_instances": num, "relay": chain})


def _set_roles(state: State, action: SetRoles, now: float) -> None:
    instance = state.instances.get(action.instance_id)
    assert instance is not None
    state.instances.put(replace(instance, pending_roles=action.roles))
    state.effects.commands.append(SetRolesCommand(instance.instance_id, instance.worker_id, action.roles))
    fields = event_fields(instance) | {"roles": role_names(action.roles)}
    state.happened(now, "set_roles", instance, action.reason, "scale.set_roles", fields)


def _drain(state: State, action: Drain, now: float) -> None:
    instance = state.instances.get(action.instance_id)
    assert instance is not None
    drain(state, instance, action.reason, now)
    if action.overdue_tenant:
        since = now - state.config.turn_s
        recent = {tenant: at for tenant, at in state.overdue_slots_at.items() if at > since}
        state.overdue_slots_at = {**recent, action.overdue_tenant: now}
    if instance.target_roles != BOTH:  # for the next of this role another time is to pass in which it is not needed
        history = state.arrivals.of(instance.version_id)
        if Role.DECODE in instance.target_roles:
            history.decode_crowded_at = now
        else:
            history.crowded_at = now
    kind = action.reason.cause
    state.happened(now, kind, instance, action.reason, f"scale.{_SCALE_EVENTS[kind]}", event_fields(instance))


def drain(state: State, instance: Instance, reason: Reason, now: float) -> None:
    """The instance takes no more requests, and leaves its slot."""
    retry_at = now + state.config.longest_drain_s
    drained = replace(instance, phase=InstancePhase.DRAINING, since=now, reason=reason, unload_retry_at=retry_at)
    state.instances.put(drained)
    _unload(state, drained, now)
    fields = event_fields(instance) | {"in_state_s": now - instance.since}
    state.happened(now, "drain", instance, reason, "instance.draining", fields)


def _unload(state: State, instance: Instance, now: float) -> None:
    # What waits for weights that do not come is served sooner elsewhere; and a drain that overran has had its time.
    has_overrun = now - instance.since >= state.config.longest_drain_s
    drain_s = 0.0 if has_overrun or instance.reason.cause in (LOAD_STALLED, LOAD_REFUSED) else state.config.drain_s
    state.effects.commands.append(UnloadCommand(instance.instance_id, instance.worker_id, drain_s))


def unload_failed(state: State, instance_id: str, now: float) -> None:
    """The worker did not respond; retried for as long as it reports the instance."""
    instance = state.instances.get(instance_id)
    if instance is not None and instance.phase is InstancePhase.DRAINING:
        state.instances.put(replace(instance, unload_retry_at=now + _UNLOAD_RETRY_S))


def retry_unloads(state: State, now: float) -> None:
    """Of workers that did not respond, and of those whose slot should be free by now."""
    for instance in state.instances.draining:
        if instance.unload_retry_at is not None and instance.unload_retry_at <= now:
            state.instances.put(replace(instance, unload_retry_at=now + state.config.longest_drain_s))
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
