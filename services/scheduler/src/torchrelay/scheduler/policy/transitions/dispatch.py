"""Requests that wait get their places. What is learned from an attempt when its prompt is computed."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from heapq import nlargest, nsmallest
from operator import itemgetter

from torchrelay.scheduler.policy import effects
from torchrelay.scheduler.policy.admission.late_requests import TimedPrompt
from torchrelay.scheduler.policy.core import (
    Admission,
    AttemptKey,
    Model,
    Placement,
    ServiceClass,
)
from torchrelay.scheduler.policy.dispatch.open_attempts import OpenAttempt
from torchrelay.scheduler.policy.dispatch.placement import MAX_SCORED, Candidate, NoPlacement
from torchrelay.scheduler.policy.dispatch.roster_entry import RosterEntry
from torchrelay.scheduler.policy.dispatch.shared_versions import max_prompts_ahead
from torchrelay.scheduler.policy.estimates.prompt_time import UNKNOWN as UNKNOWN_PROMPT_TIME
from torchrelay.scheduler.policy.estimates.token_time import UNKNOWN as UNKNOWN_TOKEN_TIME
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.transitions import backlogs, rosters

_MAX_TIMELY = 32  # requests that are looked at for whether all can be in time
_MAX_INSTANCES = 16  # those that are free first: they stand for all of a version then


def place_waiting(state: State, now: float, version_ids: Iterable[str] | None = None) -> None:
    """Places waiting requests in the order of their queues, until none can be placed now."""
    for version_id in state.queues.versions if version_ids is None else version_ids:
        place_version(state, version_id, now)


def place_due(state: State, now: float) -> None:
    """Places what waited for an instance to come near the end of its prompts."""
    for version_id in state.due.passed(now):
        place_version(state, version_id, now)


def place_version(state: State, version_id: str, now: float) -> None:
    if state.roster_cache.is_blocked(version_id, now):
        return
    state.due.pop(version_id, None)
    state.roster_cache.unblock(version_id)
    model = state.models.get(version_id)
    if model is None or not state.queues.num_waiting(version_id):
        return
    entries = rosters.roster(state, model, now)
    tenants: set[str] = set()  # whose requests were looked at
    too_large: list[AttemptKey] = []
    while entries and (admission := state.queues.next(version_id, now)) is not None:
        if state.queues.num_waiting(version_id) > 1 and admission.tenant not in tenants:
            tenants.add(admission.tenant)
            _choose_late(state, admission, model, now)
            continue  # it may not be next any more
        found = _placement(state, admission, model, entries, now)
        if isinstance(found, NoPlacement):
            if found.is_own:
                state.queues.park(admission.key)  # for every instance there is; others need not wait for it
                too_large.append(admission.key)
                continue
            if not math.isinf(found.due):
                state.due[version_id] = found.due
            if found.is_of_all and not state.shared_versions.is_shared(version_id, now):
                state.roster_cache.block(version_id, found.due)
            break
        is_late = now + found.predicted.ttft_s > admission.deadline
        if is_late and _may_be_late(admission) and _fall_late(state, admission, found.predicted.prefill_s):
            continue
        state.queues.take(admission.key, now)
        bind(state, admission, found, now)
    for key in too_large:
        state.queues.unpark(key)


def _may_be_late(admission: Admission) -> bool:
    """Whether the request may yield its place: a request that has begun never does."""
    return not admission.was_recalled and not admission.num_forced_tokens


def _fall_late(state: State, admission: Admission, prompt_s: float) -> bool:
    """False if it was late already."""
    return state.queues.fall_late(admission.key, state.strategies.late_rank(admission, prompt_s))


def _choose_late(state: State, admission: Admission, model: Model, now: float) -> None:
    """Mark requests of this request's tenant as late: those that any placement would miss, and those that would make
    more others late. ``admission`` is next. Batch work is left out: its deadline is far.
    """
    entries = rosters.prefills(state, model, now)
    if admission.service_class is ServiceClass.BATCH or not entries:
        return
    timely, share = state.queues.timely_beside(admission.key, _MAX_TIMELY)
    work_of, prompt_s = state.attempts.at, backlogs.computation_s(state, model, entries)
    busy_s = (entry.load_left_s(now) + entry.ahead_s(work_of(entry.instance_id).queue, now) for entry in entries)
    free_at = [now + seconds for seconds in nsmallest(_MAX_INSTANCES, busy_s)]
    prompts = [
        TimedPrompt(request.key, request.deadline, prompt_s(request.num_prefill_tokens), _may_be_late(request))
        for request in timely
    ]
    late = set(state.strategies.choose_late(prompts, free_at, share * len(entries) / len(free_at)))
    for request, prompt in zip(timely, prompts, strict=True):
        if request.key in late:
            _fall_late(state, request, prompt.prompt_s)


def _placement(
    state: State, admission: Admission, model: Model, entries: Sequence[RosterEntry], now: float
) -> Placement | NoPlacement:
    """Place the request. In a large roster only the likeliest entries are tried, unless none of them will do."""

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

    shortlist = state.roster_cache.shortlist(model.version_id, state.attempts.at)
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
    """Instances outside `known` with the longest cached prefix of the prompt."""
    hashes, index = admission.block_hashes, state.prefix_index
    having = [
        (index.num_blocks(entry.instance_id, hashes), entry) for entry in entries if entry.instance_id not in known
    ]
    return [entry for num_blocks, entry in nlargest(MAX_SCORED, having, key=itemgetter(0)) if num_blocks]


def bind(state: State, admission: Admission, found: Placement, now: float) -> None:
    """The attempt runs there from now on; its gateway is told."""
    open_attempt(state, admission, found, False, now)
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
    return not entry.plays_prefill or len(candidate.work.queue) < max_prompts_ahead(entry.latency)


def candidates(state: State, admission: Admission, model: Model, now: float) -> list[Candidate]:
    """The roster as the attempt sees it."""
    return _candidates(state, admission, model, rosters.roster(state, model, now), now)


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


def open_attempt(state: State, admission: Admission, placement: Placement, is_computed: bool, now: float) -> None:
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
    state.roster_cache.unblock(attempt.admission.version_id)
    if state.instances.get(attempt.placement.prefill.instance_id):
        _learn_from_first_token(state, attempt, now, is_measured=is_measured)
    place_version(state, attempt.admission.version_id, now)


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
