"""Live scaling: a loading instance computes the first layers of prompts, and a loaded instance takes the prompts over.

While each loaded instance of a version has a full step of prompts ahead, waiting prompts are dispatched to a loading
instance, which computes them layer by layer as the layers arrive. A loaded instance that can take a prompt takes the
prompt that was dispatched to a loading instance first, with what is computed of it, and computes the other layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torchrelay.common.quantities import format_duration
from torchrelay.scheduler.policy.dispatch.endpoint import Endpoint
from torchrelay.scheduler.policy.dispatch.open_attempts import OpenAttempt
from torchrelay.scheduler.policy.dispatch.placement import MOVE_S
from torchrelay.scheduler.policy.dispatch.returning_prompts import ReturningPrompt
from torchrelay.scheduler.policy.dispatch.shared_versions import max_prompts_ahead
from torchrelay.scheduler.policy.handlers import endpoints, recalls
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.strategies import LoadingPrompts
from torchrelay.scheduler.policy.types import Admission, InstancePhase, Model, ServiceClass

_MIN_WAIT_S = 0.001
_RETURN_S = 0.5  # no instance is kept free any longer for a recalled prompt
_CACHED_SHARE = 0.5  # of a prompt: an instance that has as much in its cache computes it itself


def is_live(state: State, version_id: str) -> bool:
    """Whether the version has instances that load."""
    return version_id in state.instances.loading_versions


def take_over(state: State, version_id: str, now: float) -> None:
    """Recalls prompts from loading instances for the loaded instances that can take prompts now."""
    model, entries, movable = _movable(state, version_id, now)
    if not movable:
        return
    reserved_s = state.returning.seconds(version_id, now)
    is_shared, waiting = state.shared_versions.is_shared(version_id, now), state.queues.next(version_id, now)
    for target in _by_work_ahead(state, entries, reserved_s, now):
        work, ahead_s = state.attempts.at(target.instance_id), _ahead_s(state, target, now)
        ahead_s += reserved_s.get(target.instance_id, 0.0)
        # These limit the prompts ahead of an instance to less than a full step.
        takes_one = is_shared or (target.plays_decode and work.has_answers)
        if is_shared and len(work.queue) >= max_prompts_ahead(target.latency):
            continue
        while movable and ahead_s < target.full_step_s and _free_at(state, target, now) <= now:
            attempt, source = movable[0]
            if waiting is not None and goes_before(waiting, attempt.admission, now):
                return
            left_s = _left_s(attempt, source, now + ahead_s)
            move_s = MOVE_S + max(_transfer_s(state, model, attempt.admission, source, target) - ahead_s, 0.0)
            if source.computed_s(_left_s(attempt, source, now), now) <= ahead_s + left_s + MOVE_S + move_s:
                break
            ahead_s += left_s + MOVE_S
            movable.pop(0)
            _recall(state, attempt, source, target, left_s, now)
            if takes_one:
                break


def next_take_over(state: State, version_id: str, now: float) -> float:
    """When the next loaded instance can take a prompt from a loading instance, without another report. Infinite if a
    report will tell.
    """
    _, entries, movable = _movable(state, version_id, now)
    if not movable:
        return math.inf
    free_at = (_free_at(state, entry, now) for entry in entries if entry.phase is not InstancePhase.LOADING)
    return min((max(at, now + _MIN_WAIT_S) for at in free_at if at >= now), default=math.inf)


def _movable(
    state: State, version_id: str, now: float
) -> tuple[Model, Sequence[Endpoint], list[tuple[OpenAttempt, Endpoint]]]:
    """The model and its prefill instances, and the prompts that may leave its loading instances, in the order in which
    they were dispatched.
    """
    model = state.models[version_id]
    if state.strategies.loading_prompts is not LoadingPrompts.MOVED:
        return model, (), []
    entries = endpoints.prefills(state, model, now)
    movable = [
        (attempt, entry)
        for entry in entries
        if entry.phase is InstancePhase.LOADING
        for attempt in state.attempts.at(entry.instance_id).prefills.values()
        if attempt.may_be_recalled
    ]
    return model, entries, sorted(movable, key=lambda pair: (pair[0].placed_at, pair[0].admission.key))


def goes_before(waiting: Admission, bound: Admission, now: float) -> bool:
    """Whether a request that waits, and is the next of its queue, is due before one that is dispatched to a load. Late
    requests come last, as in the queue.
    """
    if waiting.service_class is ServiceClass.BATCH:
        return False
    return (waiting.deadline < now, waiting.deadline) < (bound.deadline < now, bound.deadline)


def _transfer_s(
    state: State, model: Model, admission: Admission, source: Endpoint, target: Endpoint, share: float = 1.0
) -> float:
    kv_bytes = round(admission.num_prefill_tokens * model.kv_bytes_per_token * share)
    return state.kv_transfer_times.predict_s(source.host_id, target.host_id, kv_bytes, state.config.kv_bytes_per_s)


def changed_entries(
    state: State, admission: Admission, entries: Sequence[Endpoint], now: float
) -> Mapping[str, Endpoint]:
    """The entries that are others for this prompt, by instance. Recalled prompts that are on their way count as queued
    where they will go. A recalled prompt goes to the instance for which it was recalled, or to another loaded one.
    """
    changed: dict[str, Endpoint] = {}
    is_stop = state.strategies.loading_prompts is LoadingPrompts.NONE
    if admission.was_recalled or is_stop:
        loaded = {e.instance_id for e in entries if e.plays_prefill and e.phase is not InstancePhase.LOADING}
        target = state.returning.target_of(admission)
        kept = {target} if target in loaded else loaded
        if kept or is_stop:
            others = [entry for entry in entries if entry.plays_prefill and entry.instance_id not in kept]
            changed = {entry.instance_id: replace(entry, plays_prefill=False) for entry in others}
    if reserved_s := state.returning.seconds(admission.version_id, now, before=admission.key.request_id):
        for entry in entries:
            if entry.instance_id in reserved_s and entry.instance_id not in changed:
                changed[entry.instance_id] = replace(entry, returning_s=reserved_s[entry.instance_id])
    return changed


def entries_ahead(
    state: State, admission: Admission, model: Model, entries: Sequence[Endpoint], now: float
) -> Sequence[Endpoint]:
    """The entries with which a prompt may be placed for which no loaded instance is free: only loading instances that
    will have computed enough of it play prefill. Empty if none will.
    """
    prefills = [entry for entry in entries if entry.plays_prefill]
    loading = [entry for entry in prefills if entry.phase is InstancePhase.LOADING]
    num_loaded, mode = len(prefills) - len(loading), state.strategies.loading_prompts
    if not num_loaded or not loading or mode is LoadingPrompts.NONE or _is_cached(state, admission, model, prefills):
        return ()
    latency = loading[0].latency
    prompt_s = admission.num_contexts * latency.prefill_s(admission.num_context_tokens)
    bound_s = {entry.instance_id: _ahead_s(state, entry, now) for entry in loading}
    is_shared = state.shared_versions.is_shared(model.version_id, now)
    takes = [
        entry
        for entry in loading
        if entry.can_take(bound_s[entry.instance_id], prompt_s, now) and not (is_shared and bound_s[entry.instance_id])
    ]
    if not takes:
        return ()
    loaded_s = sum(_ahead_s(state, entry, now) for entry in prefills if entry.phase is not InstancePhase.LOADING)
    waiting_s = latency.queued_s(state.queues.num_prefill_tokens(model.version_id))
    taken_at = now + (loaded_s + sum(bound_s.values())) / num_loaded  # by a loaded instance, after all prompts there
    last_s = (loaded_s + waiting_s) / num_loaded
    target = next(entry for entry in prefills if entry.phase is not InstancePhase.LOADING)

    def gains(entry: Endpoint) -> bool:
        share = entry.loaded_share(taken_at)
        transfer_s = _transfer_s(state, model, admission, entry, target, share)
        if mode is LoadingPrompts.MOVED and prompt_s * share > MOVE_S + transfer_s:
            return True
        return entry.computed_s(bound_s[entry.instance_id] + prompt_s, now) <= last_s

    gaining = {entry.instance_id for entry in takes if gains(entry)}
    if not gaining:
        return ()
    return [
        replace(entry, plays_prefill=False) if entry.plays_prefill and entry.instance_id not in gaining else entry
        for entry in entries
    ]


def _is_cached(state: State, admission: Admission, model: Model, prefills: Sequence[Endpoint]) -> bool:
    """Whether a loaded instance has most of the prompt in its cache."""
    if not admission.block_hashes:
        return False
    enough = _CACHED_SHARE * admission.num_context_tokens
    return any(
        state.prefix_index.num_blocks(entry.instance_id, admission.block_hashes) * model.routing_block_tokens > enough
        for entry in prefills
        if entry.phase is not InstancePhase.LOADING
    )


def _by_work_ahead(
    state: State, entries: Sequence[Endpoint], reserved_s: Mapping[str, float], now: float
) -> Sequence[Endpoint]:
    """Loaded instances, those with the least work ahead first."""
    loaded = [entry for entry in entries if entry.phase is not InstancePhase.LOADING]
    ahead = [(_ahead_s(state, e, now) + reserved_s.get(e.instance_id, 0.0), e.instance_id, e) for e in loaded]
    return [entry for _, _, entry in sorted(ahead, key=lambda item: item[:2])]


def _free_at(state: State, entry: Endpoint, now: float) -> float:
    """When the instance can take a prompt, without another report."""
    work = state.attempts.at(entry.instance_id)
    at = entry.bindable_at(work.queue, now)
    if entry.plays_decode and work.has_answers:
        at = max(at, work.queue.paused_until(entry.latency.tbt_s(work.num_choices, work.num_attended)))
    return at


def _ahead_s(state: State, entry: Endpoint, now: float) -> float:
    return entry.ahead_s(state.attempts.at(entry.instance_id).queue, now)


def _left_s(attempt: OpenAttempt, source: Endpoint, at: float) -> float:
    """Predicted time of the part of a prompt that its loading instance has not computed by then. The instance computes
    the prompt that was dispatched first whenever it has another layer.
    """
    prompt_s = attempt.placement.predicted.prefill_s
    return max(prompt_s - min(at - attempt.placed_at, prompt_s * source.loaded_share(at)), 0.0)


def _recall(state: State, attempt: OpenAttempt, source: Endpoint, target: Endpoint, left_s: float, now: float) -> None:
    key, worker_id = attempt.admission.key, target.worker_ref.worker_id
    prompt = ReturningPrompt(target.instance_id, left_s + MOVE_S, now + _RETURN_S)
    state.returning.add(attempt.admission.version_id, key.request_id, prompt)
    moves = state.prompt_moves.setdefault(source.instance_id, {})
    number, saved_s = moves.get(worker_id, (0, 0.0))
    moves[worker_id] = number + 1, saved_s + attempt.placement.predicted.prefill_s - left_s
    reason = (
        f"{source.worker_ref.worker_id} loads for {format_duration(source.load_left_s(now))} more, "
        f"{worker_id} computes the other layers of attempt {key.attempt}"
    )
    recalls.order(state, attempt, is_loading=True, reason=reason, now=now)
