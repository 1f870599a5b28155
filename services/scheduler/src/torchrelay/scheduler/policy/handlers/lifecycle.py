"""The life of an admission: admit -> (wait) -> placed -> released. Idempotent: a key counts once."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import structs

from torchrelay.common.quantities import format_duration
from torchrelay.scheduler.policy import effects
from torchrelay.scheduler.policy.autoscaling.view import cover_both_roles
from torchrelay.scheduler.policy.cluster.open_attempts import OpenAttempt
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.dispatch import backlogs, dispatch
from torchrelay.scheduler.policy.handlers import scaling
from torchrelay.scheduler.policy.prediction import Outcome
from torchrelay.scheduler.policy.queue.model_queue import MAX_RETRY_S, MIN_RETRY_S
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.types import (
    Admission,
    AttemptKey,
    LatencyTargets,
    Model,
    Placement,
    ServiceClass,
)

_LEAST_AHEAD_S = 1e-3  # lower bound of the prompt time ahead in a full queue
_SWEEP_S = 10.0  # waiting requests are checked for this long after a reason to refuse them: rounds may be late


def admit(
    state: State, admission: Admission, model: Model, current: Placement | None, is_computed: bool, now: float
) -> bool:
    """Handles an admission. True if it waits in the queue now, newly or still."""
    key = admission.key
    state.gateways.confirm(admission.gateway_id, key)
    opened = state.attempts.get(key)
    is_known = opened is not None or key in state.queues
    is_new_call = key.attempt == 1 and current is None and not is_known
    scaling.note_model(state, model, now, is_new_call=is_new_call)
    state.versions.of(admission.version_id).usage.callers.note(admission.tenant, now)
    _suspect_failed_workers(state, admission, now)
    if opened is not None:
        if is_computed:  # the first-token message may have been lost with its stream
            dispatch.first_token(state, key, now, is_measured=False)
        if current is None:
            state.effects.answers.append(effects.Placed(admission.gateway_id, opened.placement))
        return False
    if key in state.queues:
        state.queues.unpark(key)
        return True
    if current is not None:
        # An earlier scheduler placed it: it runs and needs no answer.
        attempt = dispatch.open_attempt(state, admission, current, is_computed, now)
        dispatch.predict_earlier_prompt(state, attempt)
        return False
    # A request that was placed on a failed load has had its tries, unless its store failed, which may be back shortly.
    has_had_tries = key.attempt > 1 and not admission.num_forced_tokens
    if (
        has_had_tries
        and not state.versions.of(admission.version_id).failures.is_of_store
        and refuse_if_given_up(state, admission, now)
    ):
        return False
    recalled = state.recalled.pop(key.request_id, None)
    if recalled is not None:  # it keeps its arrival time and is never displaced by a newer request
        admission = structs.replace(
            admission,
            admitted_at=recalled.admitted_at,
            age_s=recalled.age_s,
            was_recalled=True,
            prompt_source=recalled.prompt_source,
            returns_to=recalled.returns_to,
        )
        state.queues.push(admission, now)
        instance = state.instances.get(admission.returns_to)
        if instance is not None and (returning := instance.returning.get(key.request_id)) is not None:
            returning.admission = admission
            state.unblock(admission.version_id)  # blocked for others, as the instance is kept for this request
        return True
    displaced = state.queues.displaced_by(admission)
    if displaced is admission and admission.num_forced_tokens:
        displaced = None  # somebody reads its answer already: it waits beyond the limit
    if displaced is not None:
        _refuse_as_full(state, displaced, state.known_model(displaced.version_id), now)
    if displaced is admission:
        return False
    if not admission.num_forced_tokens:
        _note_arrival(state, admission, now)
    state.queues.push(admission, now)
    return True


def _note_arrival(state: State, admission: Admission, now: float) -> None:
    version_id = admission.version_id
    is_unused = not state.queues.num_waiting(version_id) and all(
        instance.work.is_idle for instance in state.instances.of_version(version_id)
    )
    usage = state.versions.of(version_id).usage
    cold_s = state.cold_s(state.known_model(version_id), usage, now) if is_unused else 0.0
    usage.arrive(admission.num_prefill_tokens, admission.ttft_target_s, cold_s, now, is_unused=is_unused)
    state.forecasts.pop(version_id, None)


def with_settings(admission: Admission, model: Model, config: PolicyConfig) -> Admission:
    """The admission with its model's limits, and latency targets: its own, else its model's, else the scheduler's."""
    service_class, of_model = admission.service_class, model.targets
    return structs.replace(
        admission,
        ttft_target_s=admission.ttft_target_s or _ttft_s(of_model, service_class) or _ttft_s(config, service_class),
        caps=model.caps,
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
    cold_s = backlogs.cold_wait_s(state, model, now)
    if cold_s is None:
        retry_s = state.queues.retry_s(model.version_id, _places_per_s(state, model, now), now)
    else:
        retry_s = min(max(cold_s, MIN_RETRY_S), MAX_RETRY_S)  # as the streams of requests that wait are told
    num_own = state.queues.num_of_tenant(model.version_id, admission.tenant)
    own = f"your waiting requests: {num_own}"
    message = f"the queue for {admission.model} is full ({own}); retry in {format_duration(retry_s)}"
    refuse(state, admission, effects.RefusalReason.QUEUE_FULL, message, now, retry_s)


def _places_per_s(state: State, model: Model, now: float) -> float:
    """Rate at which places in the queue become free: measured if recent, otherwise predicted."""
    measured = state.queues.places_per_s(model.version_id, now)
    if measured is not None:
        return measured
    return max(state.queues.num_waiting(model.version_id), 1) / max(
        backlogs.prompts_ahead_s(state, model, now), _LEAST_AHEAD_S
    )


def park(state: State, keys: Iterable[AttemptKey]) -> None:
    """Parks requests whose gateway is gone: they keep their positions in the queue, and are not placed before the
    gateway asks for them again.
    """
    for key in keys:
        state.queues.park(key)
        if (admission := state.queues.get(key)) is not None:
            state.versions.of(admission.version_id).too_large.discard(key)


def _suspect_failed_workers(state: State, admission: Admission, now: float) -> None:
    """Suspects the workers that failed the request, which are not used until they report again.

    A gateway may learn of a failure first: when a load fails, its attempts end and return within a millisecond.
    """
    for worker_id in admission.lost_workers:
        _suspect(state, worker_id, now)
    for instance_id in state.instances_without_token.pop(admission.key.request_id, ()):
        if instance := state.instances.get(instance_id):
            _suspect(state, instance.worker_id, now)


def _suspect(state: State, worker_id: str, now: float) -> None:
    state.membership.suspect(worker_id, now)
    if instance := state.instances.on_worker(worker_id):
        state.forget_endpoints(instance.version_id)


def withdraw(state: State, key: AttemptKey, now: float) -> None:
    """Removes a request whose client left. If a placement crossed the withdrawal, its resources are released."""
    admission = state.queues.get(key)
    attempt = release(state, key, now)
    if admission is None and attempt is not None:
        admission = attempt.admission
    if admission is not None:
        dispatch.place_version(state, admission.version_id, now)


def release(state: State, key: AttemptKey, now: float) -> OpenAttempt | None:
    """Closes an attempt that is over, whether it waited or ran."""
    state.gateways.forget(key)
    if (waiting := state.queues.remove(key, now)) is not None:
        state.does_not_return(key.request_id, waiting.returns_to)
        state.versions.of(waiting.version_id).too_large.discard(key)
    attempt = state.attempts.close(key, now)
    if attempt is not None:
        state.unblock(attempt.admission.version_id)
        version = state.versions.of(attempt.admission.version_id)
        version.aliases.used(attempt.admission.model, now)
        version.usage.last_used = now
        for instance_id in attempt.instance_ids:
            state.instances.touch(instance_id, now)
        if (version_id := attempt.admission.version_id) not in state.idle_deadlines:
            state.idle_deadlines.note(version_id, now + state.keep_s(version_id, now))
    return attempt


def observe_outcome(state: State, attempt: OpenAttempt, outcome: Outcome, now: float) -> None:
    """Learns the KV transfer time and the time between tokens; workers learn their step times themselves."""
    predicted, instance = attempt.placement.predicted, state.instances.get(attempt.placement.decode.instance_id)
    if outcome.tbt_s is not None and not attempt.placement.cold and instance is not None:
        instance.token_time.correction.observe(predicted.tbt_s, predicted.tbt_correction, outcome.tbt_s, now)
    model, admission = state.versions.model(attempt.admission.version_id), attempt.admission
    workers = state.membership.workers
    prefill = workers.get(attempt.placement.prefill.worker_id)
    decode = workers.get(attempt.placement.decode.worker_id)
    if outcome.kv_transfer_s is None or model is None or prefill is None or decode is None or prefill is decode:
        return
    kv_bytes = admission.num_prefill_tokens * model.kv_bytes_per_token
    state.kv_transfer_times.observe(prefill.host_id, decode.host_id, kv_bytes, outcome.kv_transfer_s)


def observe_length(state: State, attempt: OpenAttempt, outcome: Outcome) -> None:
    """Learns the length of an answer that does not go on in another attempt."""
    admission = attempt.admission
    if outcome.num_output_tokens:
        num_tokens = admission.num_forced_tokens + outcome.num_output_tokens / max(admission.num_choices, 1)
        state.versions.of(admission.version_id).usage.answers.observe(num_tokens)


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
    """Refuses a request whose model will not be loaded for a while after its last try, unless instances serve it."""
    cause = state.versions.of(admission.version_id).failures.given_up_for(now)
    instances = state.instances.of_version(admission.version_id)
    if not cause or cover_both_roles(instance for instance in instances if instance.placeable):
        return False
    message = f"{admission.model} could not be loaded: {cause}"
    refuse(state, admission, effects.RefusalReason.LOAD_FAILED, message, now, state.config.load_backoff_max_s)
    return True
