"""Live scaling: a loading instance computes the first layers of prompts, and a loaded instance takes the prompts over.

While each loaded instance of a version has a full step of prompts ahead, waiting prompts are dispatched to a loading
instance, which computes them layer by layer as the layers arrive. A loaded instance that can take a prompt takes the
prompt that was dispatched to a loading instance first, with what is computed of it, and computes the other layers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from torchrelay.common.quantities import format_duration
from torchrelay.scheduler.policy.cluster.instance import Instance, ReturningPrompt
from torchrelay.scheduler.policy.cluster.open_attempts import OpenAttempt
from torchrelay.scheduler.policy.dispatch import endpoints, recalls
from torchrelay.scheduler.policy.dispatch.placement import MOVE_S, is_within
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.strategies import LoadingPrompts
from torchrelay.scheduler.policy.types import Admission, Model, ServiceClass

_MIN_WAIT_S = 0.001
_RETURN_S = 0.5  # no instance is kept free any longer for a recalled prompt


def is_live(state: State, version_id: str) -> bool:
    """Whether the version has instances that load."""
    return version_id in state.instances.loading_versions


def take_over(state: State, version_id: str, now: float) -> None:
    """Recalls prompts from loading instances for the loaded instances that can take prompts now."""
    model, prefills, movable = _movable(state, version_id, now)
    if not movable:
        return
    is_shared = state.versions.of(version_id).usage.callers.are_several(now)
    waiting = state.queues.next(version_id, now)
    for target in _by_work_ahead(prefills, now):
        work, ahead_s = target.work, target.ahead_s(now) + target.returning_s(now)
        # These limit the prompts ahead of an instance to less than a full step.
        takes_one = is_shared or (target.plays_decode and work.has_answers)
        if is_shared and len(work.queue) >= target.max_prompts_ahead:
            continue
        while movable and ahead_s < target.full_step_s and _free_at(target, now) <= now:
            pair = next((pair for pair in movable if _has_place(state, target, pair[0])), None)
            if pair is None:
                break
            attempt, source = pair
            if waiting is not None and goes_before(waiting, attempt.admission, now):
                return
            left_s = _left_s(attempt, source, now + ahead_s)
            move_s = MOVE_S + max(_transfer_s(state, model, attempt.admission, source, target) - ahead_s, 0.0)
            if source.computed_s(_left_s(attempt, source, now), now) <= ahead_s + left_s + MOVE_S + move_s:
                break
            ahead_s += left_s + MOVE_S
            movable.remove(pair)
            _recall(state, attempt, source, target, left_s, now)
            if takes_one:
                break


def _has_place(state: State, target: Instance, attempt: OpenAttempt) -> bool:
    """Whether the limits of the attempt's model allow its prompt there."""
    admission = attempt.admission
    caps = state.versions.of(admission.version_id).aliases.caps_of(admission.model, admission.caps)
    return target.instance_id in attempt.instance_ids or is_within(target, admission, caps, 0)


def next_take_over(state: State, version_id: str, now: float) -> float:
    """When the next loaded instance can take a prompt from a loading instance, without another report. Infinite if a
    report will tell.
    """
    _, prefills, movable = _movable(state, version_id, now)
    if not movable:
        return math.inf
    free_at = (_free_at(instance, now) for instance in prefills if not instance.is_loading)
    return min((max(at, now + _MIN_WAIT_S) for at in free_at if at >= now), default=math.inf)


def _movable(
    state: State, version_id: str, now: float
) -> tuple[Model, Sequence[Instance], list[tuple[OpenAttempt, Instance]]]:
    """The model and its prefill instances, and the prompts that may leave its loading instances, in the order in which
    they were dispatched.
    """
    model = state.known_model(version_id)
    if state.strategies.loading_prompts is not LoadingPrompts.MOVED:
        return model, (), []
    prefills = endpoints.of_version(state, model, now).prefills
    movable = [
        (attempt, instance)
        for instance in prefills
        if instance.is_loading
        for attempt in instance.work.prefills.values()
        if attempt.may_be_recalled
    ]
    return model, prefills, sorted(movable, key=lambda pair: (pair[0].placed_at, pair[0].admission.key))


def goes_before(waiting: Admission, bound: Admission, now: float) -> bool:
    """Whether a request that waits, and is the next of its queue, is due before one that is dispatched to a load. Late
    requests come last, as in the queue.
    """
    if waiting.service_class is ServiceClass.BATCH:
        return False
    return (waiting.deadline < now, waiting.deadline) < (bound.deadline < now, bound.deadline)


def _transfer_s(
    state: State, model: Model, admission: Admission, source: Instance, target: Instance, share: float = 1.0
) -> float:
    kv_bytes = round(admission.num_prefill_tokens * model.kv_bytes_per_token * share)
    return state.kv_transfer_times.predict_s(source.host_id, target.host_id, kv_bytes, state.config.kv_bytes_per_s)


def allowed_prefills(state: State, admission: Admission, prefills: Collection[Instance]) -> Collection[Instance] | None:
    """The instances that may compute the prompt while no loading instance has to; None: any. A recalled prompt goes to
    the instance for which it was recalled, or to another loaded one.
    """
    is_stop = state.strategies.loading_prompts is LoadingPrompts.NONE
    if not (admission.was_recalled or is_stop):
        return None
    loaded = [instance for instance in prefills if not instance.is_loading]
    own = [instance for instance in loaded if instance.instance_id == admission.returns_to]
    return own or loaded or ([] if is_stop else None)


def prefills_ahead(
    state: State, admission: Admission, model: Model, prefills: Sequence[Instance], now: float
) -> Sequence[Instance]:
    """The loading instances that may compute a prompt for which no loaded instance is free: they will have computed
    enough of it.
    """
    loading = [instance for instance in prefills if instance.is_loading]
    num_loaded, mode = len(prefills) - len(loading), state.strategies.loading_prompts
    if not num_loaded or not loading or mode is LoadingPrompts.NONE:
        return ()
    latency = loading[0].latency
    prompt_s = admission.num_contexts * latency.prefill_s(admission.num_context_tokens)
    bound_s = {instance: instance.ahead_s(now) for instance in loading}
    is_shared = state.versions.of(model.version_id).usage.callers.are_several(now)
    takes = [
        instance
        for instance in loading
        if instance.can_take(bound_s[instance], prompt_s, now) and not (is_shared and bound_s[instance])
    ]
    if not takes:
        return ()
    loaded_s = sum(instance.ahead_s(now) for instance in prefills if not instance.is_loading)
    waiting_s = latency.queued_s(state.queues.num_prefill_tokens(model.version_id))
    taken_at = now + (loaded_s + sum(bound_s.values())) / num_loaded  # by a loaded instance, after all prompts there
    last_s = (loaded_s + waiting_s) / num_loaded
    target = next(instance for instance in prefills if not instance.is_loading)

    def gains(instance: Instance) -> bool:
        share = instance.share_loaded_at(taken_at)
        transfer_s = _transfer_s(state, model, admission, instance, target, share)
        if mode is LoadingPrompts.MOVED and prompt_s * share > MOVE_S + transfer_s:
            return True
        return instance.computed_s(bound_s[instance] + prompt_s, now) <= last_s

    return [instance for instance in takes if gains(instance)]


def _by_work_ahead(prefills: Sequence[Instance], now: float) -> Sequence[Instance]:
    """Loaded instances, those with the least work ahead first."""
    loaded = [instance for instance in prefills if not instance.is_loading]
    ahead = [(each.ahead_s(now) + each.returning_s(now), each.instance_id, each) for each in loaded]
    return [instance for _, _, instance in sorted(ahead, key=lambda item: item[:2])]


def _free_at(instance: Instance, now: float) -> float:
    """When the instance can take a prompt, without another report."""
    at, work = instance.bindable_at(now), instance.work
    if instance.plays_decode and work.has_answers:
        at = max(at, work.queue.paused_until(instance.latency.tbt_s(work.num_choices, work.num_attended)))
    return at


def _left_s(attempt: OpenAttempt, source: Instance, at: float) -> float:
    """Predicted time of the part of a prompt that its loading instance has not computed by then. The instance computes
    the prompt that was dispatched first whenever it has another layer.
    """
    prompt_s = attempt.placement.predicted.prefill_s
    return max(prompt_s - min(at - attempt.placed_at, prompt_s * source.share_loaded_at(at)), 0.0)


def _recall(state: State, attempt: OpenAttempt, source: Instance, target: Instance, left_s: float, now: float) -> None:
    key, worker_id = attempt.admission.key, target.worker_ref.worker_id
    attempt.returns_to = target.instance_id
    target.returning[key.request_id] = ReturningPrompt(attempt.admission.model, left_s + MOVE_S, now + _RETURN_S)
    number, saved_s = source.prompt_moves.get(worker_id, (0, 0.0))
    source.prompt_moves[worker_id] = number + 1, saved_s + attempt.placement.predicted.prefill_s - left_s
    reason = (
        f"{source.worker_ref.worker_id} loads for {format_duration(source.load_left_s(now))} more, "
        f"{worker_id} computes the other layers of attempt {key.attempt}"
    )
    recalls.order(state, attempt, is_loading=True, reason=reason, now=now)
