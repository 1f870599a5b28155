"""Live scaling: a loading instance computes the first layers of prompts, and a loaded instance takes the prompts over.

While each loaded instance of a version has a full step of prompts ahead, waiting prompts are bound to a loading
instance, which computes them layer by layer as the layers arrive. A loaded instance that can take a prompt takes the
prompt that was bound to a loading instance first, with what is computed of it, and computes the other layers.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import replace

from torchrelay.common.quantities import format_duration
from torchrelay.scheduler.policy import effects
from torchrelay.scheduler.policy.core import Admission, InstancePhase, Model
from torchrelay.scheduler.policy.dispatch.open_attempts import OpenAttempt
from torchrelay.scheduler.policy.dispatch.placement import MOVE_S
from torchrelay.scheduler.policy.dispatch.roster_entry import RosterEntry
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.strategies import LoadingPrompts
from torchrelay.scheduler.policy.transitions import rosters

_MIN_WAIT_S = 0.001  # an overdue instance is checked again after this time
_RETURN_S = 0.5  # a recalled prompt that has not returned by then does not keep an instance free any longer


def is_live(state: State, version_id: str) -> bool:
    """Whether the version has instances that load."""
    return version_id in state.instances.loading_versions


def take_over(state: State, version_id: str, now: float) -> float:
    """Recalls prompts from loading instances for the loaded instances that can take prompts now.

    Returns when the next loaded instance can; infinite if loading instances have no prompts.
    """
    model = state.models.get(version_id)
    if model is None or state.strategies.loading_prompts is not LoadingPrompts.MOVED:
        return math.inf
    entries = rosters.prefills(state, model, now)
    sources = [entry for entry in entries if entry.phase is InstancePhase.LOADING]
    for target, ahead_s in _free(state, version_id, entries, now)[0]:
        while ahead_s < target.full_step_s:
            movable = [(attempt, source) for source in sources if (attempt := _first(state, source)) is not None]
            if not movable:
                return math.inf
            attempt, source = min(movable, key=lambda pair: pair[0].placed_at)
            prompt_s = attempt.placement.predicted.prefill_s
            left_s = prompt_s * (1 - source.loaded_share(now + ahead_s)) + MOVE_S
            if source.computed_s(prompt_s, now) <= ahead_s + left_s:
                break
            ahead_s += left_s
            _recall(state, attempt, source, target, left_s, now)
    if not any(_first(state, source) is not None for source in sources):
        return math.inf
    loaded = (entry for entry in entries if entry.phase is not InstancePhase.LOADING)
    return max(min((_free_at(state, entry) for entry in loaded), default=math.inf), now + _MIN_WAIT_S)


def returned(state: State, admission: Admission) -> None:
    """Records that a recalled prompt is placed again."""
    if (returning := state.returning.get(admission.version_id)) is not None:
        returning.pop(admission.key.request_id, None)


def without_reserved(
    state: State, admission: Admission, entries: Sequence[RosterEntry], now: float
) -> Sequence[RosterEntry]:
    """The entries, of which those that recalled prompts are about to take play no prefill for another prompt."""
    if state.strategies.loading_prompts is LoadingPrompts.NONE:
        loading = {entry.instance_id for entry in entries if entry.phase is InstancePhase.LOADING}
        return _without_prefill(entries, loading)
    if admission.was_recalled:
        return entries
    return _without_prefill(entries, _free(state, admission.version_id, entries, now)[1])


def _without_prefill(entries: Sequence[RosterEntry], instance_ids: Container[str]) -> Sequence[RosterEntry]:
    return [replace(entry, plays_prefill=False) if entry.instance_id in instance_ids else entry for entry in entries]


def entries_ahead(
    state: State, admission: Admission, model: Model, entries: Sequence[RosterEntry], now: float
) -> Sequence[RosterEntry]:
    """The entries with which a prompt may be placed for which no loaded instance is free: only loading instances that
    will have computed enough of it play prefill. Empty if none will.
    """
    mode, queue_of = state.strategies.loading_prompts, lambda entry: state.attempts.at(entry.instance_id).queue
    loaded = [entry for entry in entries if entry.plays_prefill and entry.phase is not InstancePhase.LOADING]
    loading = [entry for entry in entries if entry.plays_prefill and entry.phase is InstancePhase.LOADING]
    if not loaded or not loading or mode is LoadingPrompts.NONE:
        return ()
    ahead_s = sum(entry.ahead_s(queue_of(entry), now) for entry in loaded)
    bound_s = sum(entry.queued_s(queue_of(entry), now) for entry in loading)
    waiting_s = loaded[0].latency.queued_s(state.queues.num_prefill_tokens(model.version_id))
    taken_at, last_s = now + (ahead_s + bound_s) / len(loaded), (ahead_s + waiting_s) / len(loaded)

    def gains(entry: RosterEntry) -> bool:
        prompt_s = admission.num_contexts * entry.latency.prefill_s(admission.num_context_tokens)
        if mode is LoadingPrompts.MOVED and prompt_s * entry.loaded_share(taken_at) > MOVE_S:
            return True
        return entry.computed_s(entry.queued_s(queue_of(entry), now) + prompt_s, now) <= last_s

    gaining = {entry.instance_id for entry in loading if gains(entry)}
    others = {entry.instance_id for entry in (*loaded, *loading)} - gaining
    return _without_prefill(entries, others) if gaining else ()


def _free(
    state: State, version_id: str, entries: Sequence[RosterEntry], now: float
) -> tuple[list[tuple[RosterEntry, float]], set[str]]:
    """Loaded instances that can take prompts, those with the least work ahead first, each with that time, and the
    instances that have or will have prompts that were recalled and are not placed yet.
    """
    loaded = [entry for entry in entries if entry.plays_prefill and entry.phase is not InstancePhase.LOADING]
    ahead = sorted(
        (entry.ahead_s(state.attempts.at(entry.instance_id).queue, now), entry.instance_id, entry)
        for entry in loaded
        if _free_at(state, entry) <= now
    )
    returning_s, free, reserved = _returning_s(state, version_id, now), [], set()
    for ahead_s, instance_id, entry in ahead:
        if returning_s:
            reserved.add(instance_id)
            taken_s = min(returning_s, max(entry.full_step_s - ahead_s, 0.0))
            ahead_s, returning_s = ahead_s + taken_s, returning_s - taken_s
        free.append((entry, ahead_s))
    return free, reserved


def _returning_s(state: State, version_id: str, now: float) -> float:
    """Time of the recalled prompts that will be placed again in a moment."""
    returning = state.returning.get(version_id)
    if returning is None:
        return 0.0
    for request_id in [request_id for request_id, (until, _) in returning.items() if until <= now]:
        del returning[request_id]
    if not returning:
        del state.returning[version_id]
    return sum(left_s for _, left_s in returning.values())


def _free_at(state: State, entry: RosterEntry) -> float:
    """When the instance can take a prompt, without another report."""
    work = state.attempts.at(entry.instance_id)
    at = entry.bindable_at(work.queue)
    if entry.plays_decode and work.has_answers:
        at = max(at, work.queue.paused_until(entry.latency.tbt_s(work.num_choices, work.num_attended)))
    return at


def _first(state: State, source: RosterEntry) -> OpenAttempt | None:
    """The prompt that was bound to a loading instance first, of those that may be recalled."""
    prefills = state.attempts.at(source.instance_id).prefills.values()
    return next((attempt for attempt in prefills if attempt.may_be_recalled), None)


def _recall(
    state: State, attempt: OpenAttempt, source: RosterEntry, target: RosterEntry, left_s: float, now: float
) -> None:
    admission = attempt.admission
    attempt.is_recalled = attempt.is_partly_computed = True
    state.returning.setdefault(admission.version_id, {})[admission.key.request_id] = now + _RETURN_S, left_s
    state.effects.answers.append(effects.Recall(admission.gateway_id, admission.key, True))
    left = format_duration(source.load_left_s(now))
    reason = (
        f"{source.worker_ref.worker_id} loads for {left} more; "
        f"{target.worker_ref.worker_id} computes the layers that are left of attempt {admission.key.attempt}"
    )
    event = effects.SchedulerEvent(now, "take_over", admission.model, admission.key.request_id, reason)
    state.effects.events.append(event)
