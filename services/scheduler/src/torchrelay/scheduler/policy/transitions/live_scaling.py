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
from torchrelay.scheduler.policy.core import Admission, InstancePhase, Model
from torchrelay.scheduler.policy.dispatch.open_attempts import OpenAttempt
from torchrelay.scheduler.policy.dispatch.placement import MOVE_S
from torchrelay.scheduler.policy.dispatch.roster_entry import RosterEntry
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.strategies import LoadingPrompts
from torchrelay.scheduler.policy.transitions import recalls, rosters

_MIN_WAIT_S = 0.001
_RETURN_S = 0.5  # a recalled prompt that has not returned by then does not keep an instance free any longer


def is_live(state: State, version_id: str) -> bool:
    """Whether the version has instances that load."""
    return version_id in state.instances.loading_versions


def take_over(state: State, version_id: str, now: float) -> None:
    """Recalls prompts from loading instances for the loaded instances that can take prompts now."""
    model = state.models.get(version_id)
    if model is None or state.strategies.loading_prompts is not LoadingPrompts.MOVED:
        return
    entries = rosters.prefills(state, model, now)
    sources = [entry for entry in entries if entry.phase is InstancePhase.LOADING]
    for target, ahead_s in _free(state, version_id, entries, now)[0]:
        while ahead_s < target.full_step_s:
            movable = [(attempt, source) for source in sources if (attempt := _first(state, source)) is not None]
            if not movable:
                return
            attempt, source = min(movable, key=lambda pair: (pair[0].placed_at, pair[0].admission.key))
            left_s = _left_s(attempt, source, now + ahead_s)
            here_s = source.computed_s(_left_s(attempt, source, now), now)
            if here_s <= ahead_s + left_s + 2 * MOVE_S:
                break
            ahead_s += left_s + MOVE_S
            _recall(state, attempt, source, target, left_s, now)


def next_take_over(state: State, version_id: str, now: float) -> float:
    """When the next loaded instance can take a prompt from a loading instance, without another report. Infinite if a
    report will tell.
    """
    model = state.models.get(version_id)
    if model is None or state.strategies.loading_prompts is not LoadingPrompts.MOVED:
        return math.inf
    entries = rosters.prefills(state, model, now)
    if not any(entry.phase is InstancePhase.LOADING and _first(state, entry) is not None for entry in entries):
        return math.inf
    free_at = (_free_at(state, entry) for entry in entries if entry.phase is not InstancePhase.LOADING)
    return min((max(at, now + _MIN_WAIT_S) for at in free_at if at >= now), default=math.inf)


def returned(state: State, admission: Admission) -> None:
    """Records that a recalled prompt is placed again."""
    if (returning := state.returning.get(admission.version_id)) is not None:
        returning.pop(admission.key.request_id, None)


def without_reserved(
    state: State, admission: Admission, entries: Sequence[RosterEntry], now: float
) -> Sequence[RosterEntry]:
    """The entries, of which those that recalled prompts are about to take play no prefill for another prompt, and the
    loading instance that a prompt has left plays none for that prompt.
    """
    if state.strategies.loading_prompts is LoadingPrompts.NONE:
        loading = {entry.instance_id for entry in entries if entry.phase is InstancePhase.LOADING}
        return _without_prefill(entries, loading)
    if admission.was_recalled:
        source = admission.prompt_source
        has_other = any(entry.plays_prefill and entry.phase is not InstancePhase.LOADING for entry in entries)
        return _without_prefill(entries, {source.worker.instance_id}) if source and has_other else entries
    return _without_prefill(entries, _free(state, admission.version_id, entries, now)[1])


def _without_prefill(entries: Sequence[RosterEntry], instance_ids: Container[str]) -> Sequence[RosterEntry]:
    return [replace(entry, plays_prefill=False) if entry.instance_id in instance_ids else entry for entry in entries]


def entries_ahead(
    state: State, admission: Admission, model: Model, entries: Sequence[RosterEntry], now: float
) -> Sequence[RosterEntry]:
    """The entries with which a prompt may be placed for which no loaded instance is free: only loading instances that
    will have computed enough of it play prefill. Empty if none will.
    """
    prefills = [entry for entry in entries if entry.plays_prefill]
    loading = [entry for entry in prefills if entry.phase is InstancePhase.LOADING]
    num_loaded, mode = len(prefills) - len(loading), state.strategies.loading_prompts
    if not num_loaded or not loading or mode is LoadingPrompts.NONE:
        return ()
    bound_s = {entry.instance_id: _ahead_s(state, entry, now) for entry in prefills}
    all_bound_s, latency = sum(bound_s.values()), loading[0].latency
    waiting_s = latency.queued_s(state.queues.num_prefill_tokens(model.version_id))
    prompt_s = admission.num_contexts * latency.prefill_s(admission.num_context_tokens)
    taken_at = now + all_bound_s / num_loaded  # by a loaded instance, after all prompts that are bound
    last_s = (all_bound_s - sum(bound_s[entry.instance_id] for entry in loading) + waiting_s) / num_loaded

    def gains(entry: RosterEntry) -> bool:
        if mode is LoadingPrompts.MOVED and prompt_s * entry.loaded_share(taken_at) > MOVE_S:
            return True
        return entry.computed_s(bound_s[entry.instance_id] + prompt_s, now) <= last_s

    gaining = {entry.instance_id for entry in loading if gains(entry)}
    return _without_prefill(entries, bound_s.keys() - gaining) if gaining else ()


def _free(
    state: State, version_id: str, entries: Sequence[RosterEntry], now: float
) -> tuple[list[tuple[RosterEntry, float]], set[str]]:
    """Loaded instances that can take prompts, those with the least work ahead first, each with that time, and the
    instances that have or will have prompts that were recalled and are not placed yet.
    """
    loaded = (entry for entry in entries if entry.plays_prefill and entry.phase is not InstancePhase.LOADING)
    ahead = [(_ahead_s(state, entry, now), entry) for entry in loaded if _free_at(state, entry) <= now]
    returning_s, free, reserved = _returning_s(state, version_id, now), list[tuple[RosterEntry, float]](), set[str]()
    for ahead_s, entry in sorted(ahead, key=lambda pair: (pair[0], pair[1].instance_id)):
        if returning_s:
            reserved.add(entry.instance_id)
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


def _ahead_s(state: State, entry: RosterEntry, now: float) -> float:
    return entry.ahead_s(state.attempts.at(entry.instance_id).queue, now)


def _left_s(attempt: OpenAttempt, source: RosterEntry, at: float) -> float:
    """Predicted time of the part of a prompt that its loading instance has not computed by then. The instance computes
    the prompt that was bound first whenever it has another layer.
    """
    prompt_s = attempt.placement.predicted.prefill_s
    return max(prompt_s - min(at - attempt.placed_at, prompt_s * source.loaded_share(at)), 0.0)


def _first(state: State, source: RosterEntry) -> OpenAttempt | None:
    """The prompt that was bound to a loading instance first, of those that may be recalled."""
    prefills = state.attempts.at(source.instance_id).prefills.values()
    return next((attempt for attempt in prefills if attempt.may_be_recalled), None)


def _recall(
    state: State, attempt: OpenAttempt, source: RosterEntry, target: RosterEntry, left_s: float, now: float
) -> None:
    key, worker_id = attempt.admission.key, target.worker_ref.worker_id
    state.returning.setdefault(attempt.admission.version_id, {})[key.request_id] = now + _RETURN_S, left_s + MOVE_S
    moves = state.prompt_moves.setdefault(source.instance_id, {})
    number, saved_s = moves.get(worker_id, (0, 0.0))
    moves[worker_id] = number + 1, saved_s + attempt.placement.predicted.prefill_s - left_s
    reason = (
        f"{source.worker_ref.worker_id} loads for {format_duration(source.load_left_s(now))} more, "
        f"{worker_id} computes the other layers of attempt {key.attempt}"
    )
    recalls.order(state, attempt, is_loading=True, reason=reason, now=now)
