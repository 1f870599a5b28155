"""The demand for a model version, which the autoscaler decides on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torchrelay.scheduler.policy.autoscaling.least_losses import VALID_S
from torchrelay.scheduler.policy.cluster.open_attempts import DispatchedWork, OpenAttempt
from torchrelay.scheduler.policy.cluster.slot_sizes import largest_pool
from torchrelay.scheduler.policy.cluster.version_aliases import tenant_of
from torchrelay.scheduler.policy.demand.demand import DecodeDemand, Demand, most_in_time
from torchrelay.scheduler.policy.dispatch import backlogs, endpoints
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.types import BOTH, ROLES, InstancePhase, Model, Role

_STUCK_S = 0.5  # an instance whose prompt is overdue by more may compute nothing


def demand_of(state: State, model: Model, now: float) -> Demand:
    """The current demand for the model."""
    version_id = model.version_id
    instances = [instance for instance in state.instances.of_version(version_id) if instance.staying]
    loading = [instance.instance_id for instance in instances if instance.phase is InstancePhase.LOADING]
    cold = state.attempts.attempts_at(loading)
    waiting = waiting_of(state, model, now)
    version, late_s = state.versions.of(version_id), state.late_s(model)
    usage, (own_s, is_computed) = version.usage, version.aliases.idle_timeout_s(now)
    rate, late_since = usage.rate(now), max([now - late_s, *(instance.changed_at for instance in instances)])
    load_s = state.load_times.by_tier(model, state.config)
    backlog_s = backlogs.backlog_s(state, model, now, waiting.num_too_large_tokens)
    answers = _answer_demand(state, model, waiting.number, now)
    num_both = sum(instance.target_roles >= BOTH for instance in instances)
    decode = answers if not num_both else None
    if decode is not None and waiting.number:
        num_tokens = state.queues.num_prefill_tokens(version_id) - waiting.num_too_large_tokens
        held_up = _num_held_up(state, model, decode, now) / waiting.number
        backlog_s -= min(held_up, 1.0) * backlogs.prompts_s(state, model, num_tokens, now)
    demand = Demand(
        model=model,
        num_waiting=waiting.number,
        num_cold=len(cold),
        oldest_wait_s=waiting.oldest_s,
        since_slot_lost_s=now - version.slot_lost_at,
        backlog_s=max(backlog_s, 0.0),
        not_before=version.failures.not_before,
        avoid=state.avoided_workers.at(now),
        most_kv_bytes=waiting.most_kv_bytes,
        least_kv_bytes=waiting.least_kv_bytes,
        by_tenant=_of_tenants(state, version_id, cold),
        arrivals_per_s=rate.requests_per_s,
        num_late_before=0 if loading else usage.num_late(late_since),
        load=backlogs.prompts_s(state, model, rate.tokens_per_s, now),
        target_s=state.ttft_target_s(usage),
        late_s=late_s,
        spare_s=late_s if is_computed else own_s,
        is_deleted=version.aliases.is_deleted,
        forecast=usage.window(state.expected_load_s(model), state.keep_s(version_id, now)),
        load_s=load_s,
        last_full_at=usage.last_full_at,
        decode=decode,
        answers=answers if 0 < num_both == len(instances) else None,
    )
    playing = Counter(role for instance in instances for role in instance.target_roles)
    if decode is not None and playing[Role.DECODE] > 1 and decode.fluid.num_saved(playing[Role.DECODE] - 1, 0.0) >= 1:
        demand = replace(demand, decode=replace(decode, last_full_at=now))
    num_serving = playing[Role.PREFILL] if decode is not None else min(playing[role] for role in ROLES)
    if num_serving < 2:
        return demand
    num_able = num_serving - sum(instance.work.queue.overdue_s(now) > _STUCK_S for instance in instances)
    works = (demand,) if demand.answers is None else (demand, demand.answers)
    if num_able < 2 or any(work.fluid.num_saved(num_able - 1, 0.0) >= 1 for work in works):
        return replace(demand, last_full_at=now)
    return demand


def note_demand(state: State, demand: Demand, now: float) -> None:
    """Stores in the state what later decisions need of the demand."""
    version_id = demand.model.version_id
    if now < demand.forecast[1] < math.inf:
        state.forecasts[version_id] = demand.forecast
    usage = state.versions.of(version_id).usage
    if instances := state.instances.of_version(version_id):
        least_per_s = usage.mean_per_s(now + VALID_S)
        state.least_losses.note(version_id, len(instances), least_per_s, state.ttft_target_s(usage), now)
    usage.last_full_at = demand.last_full_at
    if demand.decode is not None:
        usage.decode_last_full_at = demand.decode.last_full_at


@dataclass(frozen=True)
class Waiting:
    """The waiting requests of a model that a present slot can serve. Requests that are too large for all present slots
    wait for another worker and are left out.
    """

    number: int = 0
    oldest_s: float = 0.0
    most_kv_bytes: int = 0  # of a pool, whose part for the request's model holds the request
    least_kv_bytes: int = 0
    num_too_large_tokens: int = 0  # of the prompts left out


def waiting_of(state: State, model: Model, now: float) -> Waiting:
    """The model's waiting requests that a present slot can serve."""
    version_id, sizes = model.version_id, state.membership.sizes
    if not state.queues.num_waiting(version_id):
        return Waiting()
    slots = sizes.since(now - state.config.unserved_resumed_s, model.slot_class)
    pools = {slot.kv_pool_bytes for slot in slots if slot.kv_pool_bytes}
    if len(pools) <= 1:  # the usual case: all slots that decode hold the same requests
        return Waiting(state.queues.num_waiting(version_id), state.queues.oldest_wait_s(version_id, now))
    largest = largest_pool(sizes.present(model.slot_class))
    waiting = state.queues.waiting(version_id)
    caps_of = state.versions.of(version_id).aliases.caps_of
    needs = {each.key: caps_of(each.model, each.caps).least_pool_bytes(each.kv_bytes(model)) for each in waiting}
    fitting = [admission for admission in waiting if needs[admission.key] <= largest]
    num_left_out = sum(admission.num_prefill_tokens for admission in waiting if needs[admission.key] > largest)
    if not fitting:
        return Waiting(num_too_large_tokens=num_left_out)
    kv_bytes = [needs[admission.key] for admission in fitting]
    oldest_s = now - min(admission.admitted_at for admission in fitting)
    return Waiting(len(fitting), oldest_s, max(kv_bytes), min(kv_bytes), num_left_out)


def _of_tenants(state: State, version_id: str, cold: Iterable[OpenAttempt]) -> dict[str, tuple[int, int]]:
    """Numbers of each tenant's requests that wait and that are placed on loading instances; empty for a single
    tenant.
    """
    tenants = tenants_of(state, version_id)
    if not tenants:
        return {}
    num_cold = Counter(tenant_of(attempt.admission.model) for attempt in cold)
    return {tenant: (state.queues.num_of_tenant(version_id, tenant), num_cold[tenant]) for tenant in tenants}


def tenants_of(state: State, version_id: str) -> list[str]:
    """Tenants that share the version; empty for a single tenant."""
    tenants = sorted({tenant_of(name) for name in state.names_of(version_id)})
    return tenants if len(tenants) > 1 else []


def _answer_demand(state: State, model: Model, num_waiting: int, now: float) -> DecodeDemand | None:
    """The demand for instances that decode; None if the length of answers or their KV is unknown."""
    usage = state.versions.of(model.version_id).usage
    num_tokens = usage.answers.mean
    if not num_tokens:
        return None
    able = endpoints.of_version(state, model, now)
    works = [instance.work for instance in able.decodes]
    if not (num_open := sum(work.num_choices for work in works)) or not able.prefills:
        return None
    first = able.decodes[0]
    correction, cost = first.token_time.correction.factor(now), first.latency.decode
    base_s = correction * cost.base_s
    attended_s = cost.per_attended_s * sum(work.num_attended for work in works) / num_open
    per_answer_s = correction * (cost.per_position_s + attended_s)
    most_open = state.config.max_open_per_instance
    pool_bytes = sum(instance.kv_pool_bytes for instance in able.decodes) / len(works)
    kv_bytes = sum(work.kv_bytes for work in works) / num_open
    num_most = max(min(int(pool_bytes / kv_bytes), most_open), 1) if kv_bytes else most_open
    num_most = _most_beside_limits(state, model.version_id, works, pool_bytes, num_open + num_waiting, num_most)
    num_held = most_in_time(num_most, state.tbt_target_s(model.version_id, now), base_s, per_answer_s)
    return DecodeDemand(
        num_answers=num_open + num_waiting,
        num_held=num_held,
        num_most=num_most,
        answer_s=able.prefills[0].full_step_s + num_tokens * (base_s + per_answer_s * num_held),
        arrivals_per_s=usage.rate(now).requests_per_s,
        target_s=state.ttft_target_s(usage),
        late_s=state.late_s(model),
        last_full_at=usage.decode_last_full_at,
    )


def _most_beside_limits(
    state: State,
    version_id: str,
    works: Sequence[DispatchedWork],
    pool_bytes: float,
    num_answers: int,
    num_most: int,
) -> int:
    """The answers per instance with which as many instances are full as the model with the most answers for its limits
    needs; ``num_most`` if one instance holds them.
    """
    capped = state.versions.of(version_id).aliases.capped
    if not capped:
        return num_most
    waiting = Counter(admission.model for admission in state.queues.waiting(version_id))
    num_needed = 1
    for name, caps in capped.items():
        own = [work.of_model[name] for work in works if name in work.of_model]
        num_open, most = sum(each.num_open for each in own), caps.most_open(num_most)
        if kv_bytes := sum(each.kv_bytes for each in own):
            most = min(most, max(int(caps.kv_share * pool_bytes * num_open / kv_bytes), 1))
        num_needed = max(num_needed, -(-(num_open + waiting[name]) // most))
    return min(num_most, -(-num_answers // num_needed)) if num_needed > 1 else num_most


def _num_held_up(state: State, model: Model, decode: DecodeDemand, now: float) -> int:
    """Number of requests that wait for a decode instance, which more prefill instances would not help."""
    return max(decode.num_answers - len(endpoints.of_version(state, model, now).decodes) * decode.num_most, 0)
