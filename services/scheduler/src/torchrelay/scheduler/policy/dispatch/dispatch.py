"""Dispatch of waiting requests to instances, and what the estimates learn when an attempt's prompt is computed."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from heapq import nlargest, nsmallest
from operator import itemgetter

from msgspec import structs

from torchrelay.scheduler.policy import effects
from torchrelay.scheduler.policy.cluster.candidate_index import CandidateIndex
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.cluster.open_attempts import OpenAttempt
from torchrelay.scheduler.policy.cluster.version_endpoints import VersionEndpoints
from torchrelay.scheduler.policy.dispatch import backlogs, endpoints, live_scaling
from torchrelay.scheduler.policy.dispatch.placement import MAX_SCORED, NoPlacement, place
from torchrelay.scheduler.policy.queue.late_requests import TimedPrompt
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.types import Admission, AttemptKey, Model, Placement, ServiceClass
from torchrelay.scheduler.policy.versions import Version

_MAX_TIMELY = 32  # requests per choice of late requests
_MAX_BEGINNING_ALIKE = 64  # instances that are searched for the longest cached prefix
_MAX_INSTANCES = 16  # per choice of late requests: the instances that are free first stand for all of the version


def place_waiting(state: State, now: float, version_ids: Iterable[str] | None = None) -> None:
    """Places waiting requests in the order of their queues, until none can be placed now."""
    for version_id in state.queues.versions if version_ids is None else version_ids:
        place_version(state, version_id, now)


def place_due(state: State, now: float) -> None:
    """Places requests of versions whose instances are now near the end of their prompts."""
    for version_id in state.due.passed(now):
        place_version(state, version_id, now)


def place_version(state: State, version_id: str, now: float) -> None:
    """Places waiting requests of the version until none can be placed now. Before them, loaded instances take over
    prompts of loading instances.
    """
    version = state.versions.get(version_id)
    if version is None or (model := version.model) is None:
        return
    if version.too_large:
        _reconsider_too_large(state, version, model, now)
    if not live_scaling.is_live(state, version_id):
        _place_waiting_of(state, version, model, now)
        return
    _place_returning(state, model, now)
    live_scaling.take_over(state, version_id, now)
    _place_waiting_of(state, version, model, now)
    state.due.note(version_id, live_scaling.next_take_over(state, version_id, now))


def _reconsider_too_large(state: State, version: Version, model: Model, now: float) -> None:
    """Returns requests that were too large for all instances of the version to the queue, once its instances differ."""
    if endpoints.of_version(state, model, now) is not version.too_large_for:
        for key in version.too_large:
            state.queues.unpark(key)
        version.too_large, version.too_large_for = set(), None


def _place_returning(state: State, model: Model, now: float) -> None:
    """Places the recalled prompts for which instances are kept free."""
    able = endpoints.of_version(state, model, now)
    returning = [prompt.admission for instance in able.prefills for prompt in instance.returning.values()]
    for admission in returning:
        if admission is not None and admission.key in state.queues:
            placement = _placement(state, admission, model, able, now)
            if not isinstance(placement, NoPlacement):
                state.queues.unpark(admission.key)  # it may be held
                state.queues.take(admission.key, now)
                start(state, admission, placement, now)


def _place_waiting_of(state: State, version: Version, model: Model, now: float) -> None:
    version_id, known = version.version_id, version.endpoints
    if known is not None and now < known.blocked_until:
        return
    state.due.pop(version_id, None)
    if not state.queues.num_waiting(version_id):
        version.too_large, version.too_large_for = set(), None
        return
    able = endpoints.of_version(state, model, now)
    largest_pool_bytes = max((instance.kv_pool_bytes for instance in able.decodes), default=0)
    tenants: set[str] = set()  # whose late requests were chosen
    passed: list[AttemptKey] = []  # too large for the instances that may take a prompt now
    at_limit: set[str] = set()  # models whose next request must wait for another of theirs to end
    for name in state.queues.held_models(version_id):
        state.queues.release(version_id, name)
    while able.all and (admission := state.queues.next(version_id, now)) is not None:
        if admission.model in at_limit:
            state.queues.hold(admission.key)
            continue
        if state.queues.num_waiting(version_id) > 1 and admission.tenant not in tenants:
            tenants.add(admission.tenant)
            _choose_late(state, admission, model, now)
            continue  # the queue may have another next request now
        placement = _placement(state, admission, model, able, now)
        if isinstance(placement, NoPlacement):
            state.due.note(version_id, placement.due)
            if placement.is_own or placement.is_capped:  # the others need not wait for it
                fits = _fits_share(version, admission, model, largest_pool_bytes)
                if fits and not placement.is_own:
                    at_limit.add(admission.model)
                    state.queues.hold(admission.key)
                    continue
                state.queues.park(admission.key)
                if fits:
                    passed.append(admission.key)
                else:
                    version.too_large.add(admission.key)
                    version.too_large_for = able
                state.queues.release(version_id, admission.model)
                continue
            # A loading instance may take a prompt although no instance is free for all.
            is_blocked = placement.is_of_all and not live_scaling.is_live(state, version_id)
            if is_blocked and not version.usage.callers.are_several(now):
                able.blocked_until = placement.due
            break
        is_late = now + placement.predicted.ttft_s > admission.deadline
        if is_late and _may_be_late(admission) and _fall_late(state, admission, placement.predicted.prefill_s):
            continue
        state.queues.take(admission.key, now)
        start(state, admission, placement, now)
        state.queues.release(version_id, admission.model)
    for key in passed:
        state.queues.unpark(key)


def _fits_share(version: Version, admission: Admission, model: Model, pool_bytes: int) -> bool:
    """Whether a pool of this size, without other requests of its model, has a share for the request."""
    return version.aliases.caps_of(admission.model, admission.caps).holds(admission.kv_bytes(model), pool_bytes)


def _may_be_late(admission: Admission) -> bool:
    """Whether the request may be marked as late; a request that was placed before never is."""
    return admission.key.attempt == 1 and not admission.num_forced_tokens


def _fall_late(state: State, admission: Admission, prompt_s: float) -> bool:
    """Marks the request as late; False if it was late already. Held requests of its model may now come before it."""
    if not state.queues.fall_late(admission.key, state.strategies.late_rank(admission, prompt_s)):
        return False
    state.queues.release(admission.version_id, admission.model)
    return True


def _choose_late(state: State, admission: Admission, model: Model, now: float) -> None:
    """Marks requests of the tenant of ``admission``, the next request, as late: requests that miss their deadlines with
    any placement, and requests that would make several others late. Skipped for batch work, whose deadline is far.
    """
    prefills = endpoints.of_version(state, model, now).prefills
    if admission.service_class is ServiceClass.BATCH or not prefills:
        return
    timely, share = state.queues.timely_beside(admission.key, _MAX_TIMELY)
    prompt_s = backlogs.computation_s(state, model, prefills)
    busy_s = nsmallest(_MAX_INSTANCES, (instance.free_s(now) for instance in prefills))
    free_at = [now + seconds for seconds in busy_s]
    prompts = [
        TimedPrompt(request.key, request.deadline, prompt_s(request.num_prefill_tokens), _may_be_late(request))
        for request in timely
    ]
    late = set(state.strategies.choose_late(prompts, free_at, share * len(prefills) / len(free_at)))
    for request, prompt in zip(timely, prompts, strict=True):
        if request.key in late:
            _fall_late(state, request, prompt.prompt_s)


def _placement(
    state: State, admission: Admission, model: Model, able: VersionEndpoints, now: float
) -> Placement | NoPlacement:
    """Places the request; if no loaded instance is free, tries instances that load."""
    if not live_scaling.is_live(state, model.version_id):
        return _best_place(state, admission, model, able, now)
    allowed = live_scaling.allowed_prefills(state, admission, able.prefills)
    placement = _best_place(state, admission, model, able, now, allowed)
    if isinstance(placement, NoPlacement) and not placement.is_own and not admission.was_recalled:
        ahead = live_scaling.prefills_ahead(state, admission, model, able.prefills, now)
        if ahead and not isinstance(placed := place(state, admission, model, ahead, able.decodes, now), NoPlacement):
            return placed
    return placement


def _best_place(
    state: State,
    admission: Admission,
    model: Model,
    able: VersionEndpoints,
    now: float,
    allowed: Container[Instance] | None = None,
) -> Placement | NoPlacement:
    """Places the request. Of many instances, tries the likeliest first, and all of them only if that fails.
    ``allowed``: the instances that may compute its prompt; None: any.
    """
    is_shared = state.versions.of(admission.version_id).usage.callers.are_several(now)

    def place_at(prefills: Sequence[Instance], decodes: Sequence[Instance]) -> Placement | NoPlacement:
        if allowed is not None:
            prefills = [each for each in prefills if each in allowed]
        if is_shared:
            full = [each for each in prefills if not each.takes_beside_others]
            prefills = [each for each in prefills if each not in full]
            decodes = [each for each in decodes if each not in full]
        return place(state, admission, model, prefills, decodes, now)

    if able.index is not None:
        likely = able.index.likeliest()
        if admission.block_hashes:
            likely += _prefix_affine(state, admission, able.index, set(likely))
        placement = place_at(
            [each for each in likely if each.plays_prefill], [each for each in likely if each.plays_decode]
        )
        if not isinstance(placement, NoPlacement) or (placement.is_of_all and able.index.is_full(now)):
            return placement
    return place_at(able.prefills, able.decodes)


def _prefix_affine(
    state: State, admission: Admission, index: CandidateIndex, known: Container[Instance]
) -> list[Instance]:
    """Instances outside ``known`` with the longest cached prefix of the prompt, of those that its beginning was placed
    on last.
    """
    hashes, prefixes = admission.block_hashes, state.prefix_index
    instances = index.of(prefixes.last_noted(hashes, _MAX_BEGINNING_ALIKE))
    by_blocks = [(prefixes.num_blocks(each.instance_id, hashes), each) for each in instances if each not in known]
    return [each for num_blocks, each in nlargest(MAX_SCORED, by_blocks, key=itemgetter(0)) if num_blocks]


def start(state: State, admission: Admission, placement: Placement, now: float) -> None:
    """Opens the attempt at the placement and answers its gateway."""
    if placement.prompt_source is not None and not _is_present(state, placement.prompt_source.worker.worker_id):
        placement = structs.replace(placement, prompt_source=None)
    state.does_not_return(admission.key.request_id, admission.returns_to)
    open_attempt(state, admission, placement, False, now)
    if not placement.cold:
        if (decode := state.instances.get(placement.decode.instance_id)) is not None:
            decode.token_time.placed(placement.predicted.step_s, now)
        num_cached = admission.num_contexts * placement.predicted.num_cached_tokens
        state.versions.of(admission.version_id).usage.prompts.observe(admission.num_prefill_tokens, num_cached)
    state.effects.answers.append(effects.Placed(admission.gateway_id, placement))
    placed = effects.AttemptPlaced(
        admission.key,
        admission.model,
        admission.admitted_at,
        now,
        placement,
        admission.traceparent,
        admission.service_class,
        0.0 if admission.num_forced_tokens else admission.ttft_target_s,
        admission.tbt_target_s,
    )
    state.effects.opened.append(placed)


def _is_present(state: State, worker_id: str) -> bool:
    """Whether the worker is neither lost nor suspected: another worker would wait in vain for its prompts."""
    return worker_id in state.membership.workers and not state.membership.is_suspect(worker_id)


def open_attempt(
    state: State, admission: Admission, placement: Placement, is_computed: bool, now: float
) -> OpenAttempt:
    """Records that the attempt runs at the placement. ``is_computed``: its prompt is computed already."""
    version = state.versions.of(admission.version_id)
    model = state.known_model(admission.version_id)
    num_tokens = version.usage.answers.expected(admission.max_tokens)
    num_attended = admission.num_attended(num_tokens)
    attempt = OpenAttempt(
        admission, placement, now, admission.kv_bytes(model), is_computed, num_attended, computed_at=now
    )
    state.attempts.open(attempt, now)
    for worker_ref in (placement.prefill, placement.decode):
        state.instances.touch(worker_ref.instance_id, now)
    return attempt


def predict_earlier_prompt(state: State, attempt: OpenAttempt) -> None:
    """Predicts the time of a prompt that an earlier scheduler dispatched. Its gateway tells of it and its worker of the
    instance, in any order.
    """
    admission, instance = attempt.admission, state.instances.get(attempt.placement.prefill.instance_id)
    worker = state.membership.workers.get(instance.worker_id) if instance is not None else None
    if instance is None or worker is None or attempt.is_computed or attempt.placement.predicted.prefill_s:
        return
    latency = state.latency_models.of(worker, instance.pack_id, state.config)
    state.attempts.predict(attempt, admission.num_contexts * latency.prefill_s(admission.num_context_tokens))


def first_token(state: State, key: AttemptKey, now: float, *, is_measured: bool = True) -> None:
    """Records that the attempt's prompt is computed: its instance can take another, and has the prefix in its cache.

    ``is_measured``: the first token came just now, so that its time can be learned from.
    """
    attempt = state.attempts.computed(key, now)
    if attempt is None:
        return
    state.unblock(attempt.admission.version_id)
    state.does_not_return(key.request_id, attempt.returns_to)  # it was computed before its recall arrived
    if (instance := state.instances.get(attempt.placement.prefill.instance_id)) is not None:
        _learn_from_first_token(state, attempt, instance, now, is_measured=is_measured)
    place_version(state, attempt.admission.version_id, now)


def _learn_from_first_token(
    state: State, attempt: OpenAttempt, instance: Instance, now: float, *, is_measured: bool
) -> None:
    placement, admission = attempt.placement, attempt.admission
    instance.last_active = now
    if is_measured and not placement.cold and placement.prompt_source is None:
        ttft_s, predicted = now - attempt.placed_at, placement.predicted
        instance.ttft_correction.observe(predicted.ttft_s, predicted.ttft_correction, ttft_s, now)
    is_late = now > admission.admitted_at + admission.ttft_target_s and (
        admission.key.attempt == 1 or admission.was_recalled  # without an outage of its worker or of the scheduler
    )
    if is_measured and admission.admitted_at > instance.since and is_late:
        state.versions.of(admission.version_id).usage.late(admission.admitted_at)
    model, worker = state.versions.model(admission.version_id), state.membership.workers.get(instance.worker_id)
    if model is not None and worker is not None and worker.has_prefix_cache and model.routing_block_tokens:
        block_bytes = max(model.routing_block_tokens * model.kv_bytes_per_token, 1)
        state.prefix_index.note(instance.instance_id, admission.block_hashes, worker.kv_pool_bytes // block_bytes)
