"""The life of an admission: admit -> (wait) -> placed -> released. Idempotent: a key counts once."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from heapq import nlargest
from operator import itemgetter

from msgspec import structs

from torchrelay.common.quantities import format_duration
from torchrelay.scheduler.policy import effects
from torchrelay.scheduler.policy.autoscaling.autoscaler_input import cover_both_roles
from torchrelay.scheduler.policy.cluster.slot_sizes import largest_pool
from torchrelay.scheduler.policy.cluster.storage_tiers import Tier, tier_of
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.core import (
    BOTH,
    Admission,
    AttemptKey,
    Instance,
    InstancePhase,
    LatencyTargets,
    Model,
    Placement,
    Role,
    ServiceClass,
    WorkerRef,
    WorkerStatus,
)
from torchrelay.scheduler.policy.dispatch.open_attempts import OpenAttempt
from torchrelay.scheduler.policy.dispatch.placement import MAX_SCORED, Candidate, NoPlacement
from torchrelay.scheduler.policy.dispatch.roster import RosterEntry, computes_alike
from torchrelay.scheduler.policy.dispatch.shared_versions import max_prompts_ahead
from torchrelay.scheduler.policy.estimates.latency import load_left_s
from torchrelay.scheduler.policy.estimates.prompt_time import UNKNOWN as UNKNOWN_PROMPT_TIME
from torchrelay.scheduler.policy.estimates.token_time import UNKNOWN as UNKNOWN_TOKEN_TIME
from torchrelay.scheduler.policy.prediction import Outcome
from torchrelay.scheduler.policy.state import State

_LEAST_AHEAD_S = 1e-3  # of a queue that is full
_SWEEP_S = 10.0  # for so long after a reason to refuse requests that wait, they are looked at: ticks may be late


def admit(
    state: State, admission: Admission, model: Model, current: Placement | None, is_computed: bool, now: float
) -> bool:
    """Accepts an admission. True if it waits now, for the first time or still."""
    key = admission.key
    state.gateways.confirm(admission.gateway_id, key)
    opened = state.attempts.get(key)
    is_known = opened is not None or key in state.queues
    is_new_call = key.attempt == 1 and current is None and not is_known
    state.note_model(model, now, is_new_call=is_new_call)
    state.shared_versions.note(admission.version_id, admission.tenant, now)
    _suspect_failed_workers(state, admission, now)
    if opened is not None:
        if is_computed:  # the message that told so may have been lost with its stream
            first_token(state, key, now, is_measured=False)
        if current is None:
            state.effects.answers.append(effects.Placed(admission.gateway_id, opened.placement))
        return False
    if key in state.queues:
        state.queues.unpark(key)
        return True
    if current is not None:
        # Placed by an earlier scheduler: it runs, and needs no answer.
        _open(state, admission, current, is_computed, now)
        return False
    # Placed on a load that failed, it has had its tries; but a store may be back in a moment.
    has_had_tries = key.attempt > 1 and not admission.num_forced_tokens
    if (
        has_had_tries
        and not state.load_failures.is_of_store(admission.version_id)
        and refuse_if_given_up(state, admission, now)
    ):
        return False
    admitted_at = state.taken_back.pop(key.request_id, None)
    if admitted_at is not None:  # it had a place, and leaves to no newcomer the one that it waits for now
        state.queues.push(structs.replace(admission, admitted_at=admitted_at, was_taken_back=True))
        return True
    displaced = state.queues.displaced_by(admission)
    if displaced is not None:
        _refuse_as_full(state, displaced, state.models[displaced.version_id], now)
    if displaced is admission:
        return False
    _note_arrival(state, admission, now)
    state.queues.push(admission)
    return True


def _note_arrival(state: State, admission: Admission, now: float) -> None:
    version_id = admission.version_id
    bound = state.attempts.bound
    is_unused = not state.queues.num_waiting(version_id) and not any(
        instance.instance_id in bound for instance in state.instances.of_version(version_id)
    )
    price_s = state.idle_timeout_s(version_id, now)
    history = state.arrivals.of(version_id)
    load_s = state.load_times.by_tier(state.models[version_id], state.config)[Tier.PEER]
    history.arrive(admission.num_prefill_tokens, admission.ttft_target_s, price_s, load_s, now, is_unused=is_unused)
    state.forecasts.pop(version_id, None)


def with_targets(admission: Admission, model: Model, config: PolicyConfig) -> Admission:
    """With its model's targets, or else the scheduler's, unless it has its own."""
    service_class, of_model = admission.service_class, model.targets
    return structs.replace(
        admission,
        ttft_target_s=admission.ttft_target_s or _ttft_s(of_model, service_class) or _ttft_s(config, service_class),
        tbt_target_s=admission.tbt_target_s or of_model.tbt_target_s or config.tbt_target_s,
    )


def _ttft_s(targets: LatencyTargets | PolicyConfig, service_class: ServiceClass) -> float:
    match service_class:
        case ServiceClass.INTERACTIVE:
            return targets.interactive_ttft_s
        case ServiceClass.STANDARD:
            return targets.standard_ttft_s
        case ServiceClass.BATCH:
            return targets.batch_ttft_s


def _refuse_as_full(state: State, admission: Admission, model: Model, now: float) -> None:
    retry_s = state.promises.promise_s(
        model.version_id, _places_per_s(state, model, now), _first_load_left_s(state, model, now), now
    )
    num_own = state.queues.num_of_tenant(model.version_id, admission.tenant)
    own = f"your requests in it: {num_own}"
    message = f"The queue of {admission.model} is full ({own}); a place is due in {format_duration(retry_s)}."
    refuse(state, admission, effects.RefusalReason.QUEUE_FULL, message, now, retry_s)


def _places_per_s(state: State, model: Model, now: float) -> float:
    """As measured of late, or else as predicted."""
    measured = state.queues.places_per_s(model.version_id, now)
    if measured is not None:
        return measured
    return max(state.queues.num_waiting(model.version_id), 1) / max(_prompts_ahead_s(state, model, now), _LEAST_AHEAD_S)


def park(state: State, keys: Iterable[AttemptKey]) -> None:
    """Their gateway is away: those that wait keep their positions, and are not placed before it asks for them again."""
    for key in keys:
        state.queues.park(key)


def _suspect_failed_workers(state: State, admission: Admission, now: float) -> None:
    """Workers that failed the request are not used until they report again.

    A gateway may know of a failure first: when a load fails, its attempts end and return within a millisecond.
    """
    for worker_id in admission.lost_workers:
        _suspect(state, worker_id, now)
    for instance_id in state.instances_without_token.pop(admission.key.request_id, ()):
        if instance := state.instances.get(instance_id):
            _suspect(state, instance.worker_id, now)


def _suspect(state: State, worker_id: str, now: float) -> None:
    state.membership.suspect(worker_id, now)
    if instance := state.instances.on_worker(worker_id):
        state.rosters.forget(instance.version_id)


def send_waiting(state: State, admission: Admission, now: float) -> None:
    """Answers that the request waits, if it still does."""
    if admission.key not in state.queues:
        return
    version_id, position = admission.version_id, state.queues.num_waiting(admission.version_id) - 1
    loading = any(instance.phase is InstancePhase.LOADING for instance in state.instances.of_version(version_id))
    wait_s = predicted_wait_s(state, state.models[version_id], now)
    answer = effects.Waiting(admission.gateway_id, admission.key, position, "loading" if loading else "queued", wait_s)
    state.effects.answers.append(answer)


def withdraw(state: State, key: AttemptKey, now: float) -> None:
    """The client left. If a placement crossed the withdrawal, its resources are released."""
    admission = state.queues.remove(key, now)
    if admission is not None:
        message = "The request was withdrawn."
        refusal = effects.AdmissionRefused(admission.gateway_id, key, effects.RefusalReason.WITHDRAWN, message)
        state.effects.answers.append(refusal)
    attempt = release(state, key, now)
    if admission is None and attempt is not None:
        admission = attempt.admission
    if admission is not None:
        _place_version(state, admission.version_id, now)


def release(state: State, key: AttemptKey, now: float) -> OpenAttempt | None:
    """The attempt is over, whether it waited or ran."""
    state.gateways.forget(key)
    state.queues.remove(key, now)
    attempt = state.attempts.close(key, now)
    if attempt is not None:
        state.rosters.unblock(attempt.admission.version_id)
        state.aliases.used(attempt.admission.version_id, attempt.admission.model, now)
        state.arrivals.used(attempt.admission.version_id, now)
        for instance_id in attempt.instance_ids:
            state.instances.touch(instance_id, now)
        if (version_id := attempt.admission.version_id) not in state.idle_deadlines:
            state.idle_deadlines.note(version_id, now + state.longest_idle_s(version_id, now))
    return attempt


def observe_outcome(state: State, attempt: OpenAttempt, outcome: Outcome, now: float) -> None:
    """Learns from the KV transfer time and the time between tokens; workers learn their step times themselves."""
    placement = attempt.placement
    if outcome.tbt_s is not None and not placement.cold and state.instances.get(placement.decode.instance_id):
        predicted = placement.predicted
        state.token_times.observe(
            placement.decode.instance_id, predicted.tbt_s, predicted.tbt_correction, outcome.tbt_s, now
        )
    model, admission = state.models.get(attempt.admission.version_id), attempt.admission
    workers = state.membership.workers
    prefill = workers.get(attempt.placement.prefill.worker_id)
    decode = workers.get(attempt.placement.decode.worker_id)
    if outcome.kv_transfer_s is None or model is None or prefill is None or decode is None or prefill is decode:
        return
    kv_bytes = admission.num_prefill_tokens * model.kv_bytes_per_token
    state.kv_transfer_times.observe(prefill.host_id, decode.host_id, kv_bytes, outcome.kv_transfer_s)


def observe_length(state: State, attempt: OpenAttempt, outcome: Outcome) -> None:
    """Learns how long the answer was that has ended; one that failed before is known in part only."""
    admission = attempt.admission
    if outcome.num_output_tokens and (admission.migrates or not admission.num_forced_tokens):
        num_tokens = admission.num_forced_tokens + outcome.num_output_tokens / max(admission.num_choices, 1)
        state.answer_lengths.observe(admission.version_id, num_tokens)


def refuse(
    state: State,
    admission: Admission,
    reason: effects.RefusalReason,
    message: str,
    now: float,
    retry_after_s: float = 0.0,
) -> None:
    release(state, admission.key, now)
    refusal = effects.AdmissionRefused(admission.gateway_id, admission.key, reason, message, retry_after_s)
    state.effects.answers.append(refusal)
    state.effects.events.append(effects.SchedulerEvent(now, "refuse", admission.model, admission.model, message))


def refuse_if_given_up(state: State, admission: Admission, now: float) -> bool:
    """Refuses a request whose model is not loaded for a while, after its last try, unless instances serve it."""
    cause = state.load_failures.given_up_for(admission.version_id, now)
    if not cause or cover_both_roles(one for one in state.instances.of_version(admission.version_id) if one.placeable):
        return False
    message = f"{admission.model} could not be loaded: {cause}"
    refuse(state, admission, effects.RefusalReason.LOAD_FAILED, message, now, state.config.load_backoff_max_s)
    return True


def refuse_infeasible(state: State, now: float) -> None:
    """Refuses the waiting requests that no slot can serve any more; those that none could are refused at once."""
    config = state.config
    since_start_s, absent_s = now - state.started_at, max(config.unserved_s, config.unserved_resumed_s)
    is_settling = since_start_s < config.refusal_settle_s + _SWEEP_S
    if not _knows_slots(state, now) or not (
        is_settling or state.membership.sizes.has_lost_any(now - absent_s - _SWEEP_S)
    ):
        return
    largest_slot = cache(partial(_largest_slot, state, now))  # of thousands of requests: few sizes
    for admission in list(state.queues):
        _refuse_if_infeasible(state, admission, largest_slot, now)


def refuse_if_infeasible(state: State, admission: Admission, now: float) -> None:
    """Refuses a waiting request that no slot can serve, and none could for some time; shortly after a start, slots may
    still appear. Where there is no slot of any size, it is for ``refuse_unserved`` to say why.
    """
    if _knows_slots(state, now):
        _refuse_if_infeasible(state, admission, partial(_largest_slot, state, now), now)


def _knows_slots(state: State, now: float) -> bool:
    return now - state.started_at >= state.config.refusal_settle_s and state.membership.sizes.largest_weights_bytes > 0


def _largest_slot(state: State, now: float, num_devices: int, absent_s: float) -> tuple[int, int]:
    """The most bytes of weights and of KV that a slot holds, of those that there are or were ``absent_s`` ago."""
    slots = state.membership.sizes.since(now - absent_s, num_devices)
    return max((slot.weights_bytes for slot in slots), default=0), largest_pool(slots)


def _refuse_if_infeasible(
    state: State, admission: Admission, largest_slot: Callable[[int, float], tuple[int, int]], now: float
) -> None:
    model = state.models[admission.version_id]
    arena, pool = largest_slot(model.num_devices, absence_limit_s(state, admission))
    needed = admission.kv_bytes(model)
    if not arena:
        message = f"{admission.model} needs a slot of {model.num_devices} devices; no worker has one."
    elif model.pack_bytes > arena:
        weights = f"The weights of {admission.model} take {model.pack_bytes:,} bytes"
        message = f"{weights}; the largest slot holds {arena:,}."
    elif needed > pool > 0:
        message = f"The request needs {needed:,} bytes of KV to its last token; the largest pool has {pool:,}."
    else:
        return
    refuse(state, admission, effects.RefusalReason.NO_CAPACITY, message, now)


def absence_limit_s(state: State, admission: Admission) -> float:
    """How long a request waits for what is not there; one that has given tokens already waits longer."""
    return state.config.unserved_resumed_s if admission.num_forced_tokens else state.config.unserved_s


def refuse_unserved(state: State, now: float) -> None:
    """Refuses requests that need a load when, for some time now, no model can be loaded anywhere.

    As long as one can, waiting is a matter of turns.
    """
    why = state.membership.why_no_load()
    if not why:
        state.unserved_since = None
        return
    if state.unserved_since is None:
        state.unserved_since = now
    for admission in list(state.queues):
        limit_s = absence_limit_s(state, admission)
        if now - state.unserved_since >= limit_s and not _has_served_roles(state, admission.version_id):
            message = f"{admission.model} cannot be loaded: {why}."
            refuse(state, admission, effects.RefusalReason.LOAD_FAILED, message, now, limit_s)


def _has_served_roles(state: State, version_id: str) -> bool:
    """Whether the workers of its instances can play both roles between them."""
    staying = (instance for instance in state.instances.of_version(version_id) if instance.staying)
    workers = (state.membership.workers.get(instance.worker_id) for instance in staying)
    return frozenset(role for worker in workers if worker for role in worker.playable_roles) >= BOTH


def place_waiting(state: State, now: float, version_ids: Iterable[str] | None = None) -> None:
    """Places waiting requests in the order of their queues, until none can be placed now."""
    for version_id in state.queues.versions if version_ids is None else version_ids:
        _place_version(state, version_id, now)


def place_due(state: State, now: float) -> None:
    """Places what waited for an instance to come near the end of its prompts."""
    for version_id in state.due.passed(now):
        _place_version(state, version_id, now)


def _place_version(state: State, version_id: str, now: float) -> None:
    if state.rosters.is_blocked(version_id, now):
        return
    state.due.pop(version_id, None)
    state.rosters.unblock(version_id)
    model = state.models.get(version_id)
    if model is None or not state.queues.num_waiting(version_id):
        return
    entries = roster(state, model, now)
    too_large: list[AttemptKey] = []
    while entries and (admission := state.queues.next(version_id, now)) is not None:
        has_begun = admission.was_taken_back or admission.num_forced_tokens  # it leaves its place to no newcomer
        if now > admission.deadline and not has_begun and state.queues.fall_late(admission.key):
            continue  # wherever it would be placed
        found = _placement(state, admission, model, entries, now)
        if isinstance(found, NoPlacement):
            if found.is_own:
                state.queues.park(admission.key)  # for every instance there is; others need not wait for it
                too_large.append(admission.key)
                continue
            if not math.isinf(found.due):
                state.due[version_id] = found.due
            if found.is_of_all and not state.shared_versions.is_shared(version_id, now):
                state.rosters.block(version_id, found.due)
            break
        is_late = now + found.predicted.ttft_s > admission.deadline
        if is_late and not has_begun and state.queues.fall_late(admission.key):
            continue
        state.queues.take(admission.key, now)
        bind(state, admission, found, now)
    for key in too_large:
        state.queues.unpark(key)


def _placement(
    state: State, admission: Admission, model: Model, entries: Sequence[RosterEntry], now: float
) -> Placement | NoPlacement:
    """Of a large roster only those are looked at that are likely to be best, unless none of them will do."""

    def placed(among: Sequence[RosterEntry]) -> Placement | NoPlacement:
        return state.strategies.place(
            admission,
            model,
            _candidates(state, admission, model, among, now),
            state.kv_transfer_times,
            state.config,
            now,
            state.answer_lengths.expected(model.version_id, admission.max_tokens),
        )

    shortlist = state.rosters.shortlist(model.version_id, state.attempts.at)
    if shortlist is not None:
        likely = shortlist.entries()
        if admission.block_hashes:
            likely += _prefix_affine(state, admission, entries, {entry.instance_id for entry in likely})
        found = placed(likely)
        if not isinstance(found, NoPlacement) or (found.is_of_all and shortlist.is_full(now)):
            return found
    return placed(entries)


def _prefix_affine(
    state: State, admission: Admission, entries: Sequence[RosterEntry], known: Container[str]
) -> list[RosterEntry]:
    """Those not known that have most of the prompt's beginning in their caches."""
    hashes, index = admission.block_hashes, state.prefix_index
    having = [(index.num_blocks(one.instance_id, hashes), one) for one in entries if one.instance_id not in known]
    return [one for num_blocks, one in nlargest(MAX_SCORED, having, key=itemgetter(0)) if num_blocks]


def bind(state: State, admission: Admission, found: Placement, now: float) -> None:
    """The attempt runs there from now on; its gateway is told."""
    _open(state, admission, found, False, now)
    if not found.cold:
        state.token_times.placed(found.decode.instance_id, found.predicted.step_s, now)
        num_cached = admission.num_contexts * found.predicted.num_cached_tokens
        state.cached_prompts.observe(admission.version_id, admission.num_prefill_tokens, num_cached)
    state.effects.answers.append(effects.Placed(admission.gateway_id, found))
    placed = effects.AttemptPlaced(
        admission.key,
        admission.model,
        admission.admitted_at,
        now,
        found,
        admission.traceparent,
        admission.service_class,
        0.0 if admission.num_forced_tokens else admission.ttft_target_s,
        admission.tbt_target_s,
    )
    state.effects.opened.append(placed)


def _takes_beside_others(candidate: Candidate) -> bool:
    entry = candidate.entry
    return not entry.plays_prefill or len(candidate.work.lane) < max_prompts_ahead(entry.latency)


def note_earlier_prompts(state: State, worker: WorkerStatus, now: float) -> None:
    """A worker reports for the first time: the prompts that it has were bound by an earlier scheduler.

    Later reports are not used: what is bound here is known more accurately, and a report may come before the first
    token of a prompt that it counts.
    """
    reported_s = worker.queued_prefill_s
    if not reported_s and worker.num_queued_prefill_tokens:
        latency = state.latency_models.of(worker, worker.slot.pack_id, state.config)
        reported_s = latency.queued_s(worker.num_queued_prefill_tokens)
    if reported_s:
        earlier = {worker_id: until for worker_id, until in state.earlier_prompts_until.items() if until > now}
        state.earlier_prompts_until = {**earlier, worker.worker_id: now + reported_s}


def roster(state: State, model: Model, now: float) -> Sequence[RosterEntry]:
    """The instances of the version that take requests."""

    def load_of(before: RosterEntry) -> RosterEntry:
        instance = state.instances.get(before.instance_id)
        assert instance is not None, "a roster is forgotten when an instance goes"
        return replace(before, loaded_at=now + _load_left_s(state, model, instance, now))

    return state.rosters.of(model.version_id, lambda: _roster(state, model, now), load_of)


def _roster(state: State, model: Model, now: float) -> Iterator[RosterEntry]:
    for instance in state.instances.of_version(model.version_id):
        worker = state.membership.workers.get(instance.worker_id)
        if not instance.placeable or worker is None or state.membership.is_suspect(worker.worker_id):
            continue
        latency = state.latency_models.of(worker, model.pack_id, state.config)
        yield RosterEntry(
            worker_ref=WorkerRef(worker.worker_id, worker.grpc_address, instance.instance_id),
            host_id=instance.host_id,
            plays_prefill=instance.plays(Role.PREFILL),
            plays_decode=instance.plays(Role.DECODE),
            phase=instance.phase,
            loaded_at=now + _load_left_s(state, model, instance, now),
            latency=latency,
            kv_pool_bytes=worker.kv_pool_bytes,
            full_step_s=latency.queued_s(latency.token_budget),
            excess_until=state.earlier_prompts_until.get(worker.worker_id, 0.0),
        )


def forget_roster(state: State, before: WorkerStatus | None, worker: WorkerStatus, instance: Instance) -> None:
    """If the worker's report, after the one ``before``, says anything new of what its instance can take. All loads of
    its version are predicted anew.
    """
    if before is None or not computes_alike(before, worker):
        state.rosters.forget(instance.version_id)
    elif instance.version_id in state.instances.loading_versions:
        state.rosters.forget_loads(instance.version_id)


def candidates(state: State, admission: Admission, model: Model, now: float) -> list[Candidate]:
    """The roster as the attempt sees it."""
    return _candidates(state, admission, model, roster(state, model, now), now)


def _candidates(
    state: State, admission: Admission, model: Model, entries: Sequence[RosterEntry], now: float
) -> list[Candidate]:
    # Thousands of times a second for a dozen entries: no look-ups where one will do.
    hashes, block_tokens, work_of, found = admission.block_hashes, model.routing_block_tokens, state.attempts.at, []
    num_cached_blocks, correction_of = state.prefix_index.num_blocks, state.corrections.of
    prompt_time_of, token_time_of = state.prompt_times.of, state.token_times.of
    for entry in entries:
        instance_id, num_cached, correction = entry.worker_ref.instance_id, 0, 1.0
        prompt_time, token_time = UNKNOWN_PROMPT_TIME, UNKNOWN_TOKEN_TIME
        if entry.plays_prefill:
            prompt_time, correction = prompt_time_of(instance_id), correction_of(instance_id, now)
            if hashes:
                num_cached = num_cached_blocks(instance_id, hashes) * block_tokens
        if entry.plays_decode:
            token_time = token_time_of(instance_id, now)
        found.append(Candidate(entry, work_of(instance_id), num_cached, correction, token_time, prompt_time))
    if state.shared_versions.is_shared(admission.version_id, now):
        return [one for one in found if _takes_beside_others(one)]
    return found


def _open(state: State, admission: Admission, placement: Placement, is_computed: bool, now: float) -> None:
    model = state.models[admission.version_id]
    num_attended = admission.num_attended(state.answer_lengths.expected(model.version_id, admission.max_tokens))
    attempt = OpenAttempt(
        admission, placement, now, admission.kv_bytes(model), is_computed, num_attended, computed_at=now
    )
    state.attempts.open(attempt, now)
    for worker_ref in (placement.prefill, placement.decode):
        state.instances.touch(worker_ref.instance_id, now)


def first_token(state: State, key: AttemptKey, now: float, *, is_measured: bool = True) -> None:
    """The prompt is computed: the instance has room for another, and its prefix in its cache.

    ``is_measured``: it was just now.
    """
    attempt = state.attempts.computed(key, now)
    if attempt is None:
        return
    state.rosters.unblock(attempt.admission.version_id)
    if state.instances.get(attempt.placement.prefill.instance_id):
        _learn_from_first_token(state, attempt, now, is_measured=is_measured)
    _place_version(state, attempt.admission.version_id, now)


def _learn_from_first_token(state: State, attempt: OpenAttempt, now: float, *, is_measured: bool) -> None:
    placement, admission = attempt.placement, attempt.admission
    instance_id, worker_id = placement.prefill.instance_id, placement.prefill.worker_id
    state.instances.touch(instance_id, now)
    if is_measured and not placement.cold:
        ttft_s, predicted = now - attempt.placed_at, placement.predicted
        state.prompt_times.observe(instance_id, predicted.steps_s, ttft_s / predicted.ttft_correction)
        state.corrections.observe(instance_id, predicted.ttft_s, predicted.ttft_correction, ttft_s, now)
    instance = state.instances.get(instance_id)
    if is_measured and instance is not None and admission.admitted_at > instance.since and now > admission.deadline:
        state.arrivals.of(admission.version_id).late(admission.admitted_at)
    model, worker = state.models.get(admission.version_id), state.membership.workers.get(worker_id)
    if model is not None and worker is not None and worker.has_prefix_cache and model.routing_block_tokens:
        block_bytes = max(model.routing_block_tokens * model.kv_bytes_per_token, 1)
        state.prefix_index.note(instance_id, admission.block_hashes, worker.kv_pool_bytes // block_bytes)


def _load_left_s(state: State, model: Model, instance: Instance, now: float) -> float:
    if instance.phase is not InstancePhase.LOADING:
        return 0.0
    expected_s = state.config.slot_setup_s
    if store := state.membership.store_of(instance.host_id):
        tier = tier_of(model.pack_id, store, state.membership.is_held(model.pack_id))
        expected_s = state.load_times.predict_s(model, tier, state.config)
    return load_left_s(instance, expected_s, now)


def backlog_s(state: State, model: Model, now: float, num_left_out: int = 0) -> float:
    """All prompts that wait for the version, here (but for so many tokens) and at its instances, in seconds of one."""
    return _backlog_s(state, model, prefills(state, model, now), now, num_left_out)


def _backlog_s(state: State, model: Model, entries: Sequence[RosterEntry], now: float, num_left_out: int = 0) -> float:
    """``entries``: the version's instances that play prefill."""
    bound = state.attempts.bound
    works = [(entry, work) for entry in entries if (work := bound.get(entry.instance_id)) is not None]
    bound_s = sum(entry.queued_s(work.lane, now) for entry, work in works)
    bound_s += sum(one.excess_until - now for one in entries if one.excess_until > now and one.instance_id not in bound)
    num_tokens = state.queues.num_prefill_tokens(model.version_id) - num_left_out
    return bound_s + _prompts_s(state, model, entries, num_tokens)


def prompts_s(state: State, model: Model, num_tokens: float, now: float) -> float:
    """Prompts of so many tokens in all, in seconds of one instance, or of a worker that could have one."""
    return _prompts_s(state, model, prefills(state, model, now), num_tokens) if num_tokens else 0.0


def _prompts_s(state: State, model: Model, entries: Sequence[RosterEntry], num_tokens: float) -> float:
    """Of prompts that are not bound yet: where an instance is loaded, as much of them is taken to be cached as was of
    late.
    """
    if not num_tokens:
        return 0.0
    if any(entry.phase is not InstancePhase.LOADING for entry in entries):
        num_tokens = math.ceil(num_tokens * state.cached_prompts.uncached_share(model.version_id))
    if entries:
        return entries[0].latency.queued_s(round(num_tokens))
    able = (one for one in state.membership.workers.values() if one.num_devices == model.num_devices)
    worker = next(able, None)
    return state.latency_models.of(worker, model.pack_id, state.config).queued_s(round(num_tokens)) if worker else 0.0


def predicted_wait_s(state: State, model: Model, now: float) -> float:
    """Until a request that arrives now gets its first token: load left, and the prompts ahead."""
    return _first_load_left_s(state, model, now) + _prompts_ahead_s(state, model, now)


def _first_load_left_s(state: State, model: Model, now: float) -> float:
    """Until an instance of the model can compute prompts."""
    entries = prefills(state, model, now)
    if not entries:
        return state.config.slot_setup_s + model.pack_bytes / state.config.relay_bytes_per_s
    if any(entry.phase is not InstancePhase.LOADING for entry in entries):
        return 0.0
    return min(entry.load_left_s(now) for entry in entries)


def _prompts_ahead_s(state: State, model: Model, now: float) -> float:
    entries = prefills(state, model, now)
    if not entries:
        return state.queues.num_prefill_tokens(model.version_id) / state.config.default_prefill_tokens_per_s
    return _backlog_s(state, model, entries, now) / len(entries)


def prefills(state: State, model: Model, now: float) -> Sequence[RosterEntry]:
    """The instances of the version that take prompts."""
    roster(state, model, now)
    return state.rosters.prefills(model.version_id)
