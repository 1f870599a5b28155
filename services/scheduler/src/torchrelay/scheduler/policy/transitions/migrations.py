"""Running answers that go on elsewhere: to empty an instance that drains, or because its tokens take too long.

Their gateways ask for another attempt, and let the running one go on until that is placed. Who moves is decided by
``dispatch/migration_gain.py``. Prompts that wait come first: while any of a version does, none of its answers moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from msgspec import structs

from torchrelay.common.latency.latency_model import LatencyModel
from torchrelay.common.quantities import format_duration
from torchrelay.scheduler.policy import effects
from torchrelay.scheduler.policy.core import Admission, AttemptKey, Instance, InstancePhase, Model, Placement
from torchrelay.scheduler.policy.dispatch.migration_gain import (
    RunningAnswer,
    lateness_gain_s,
    num_tokens_left,
    worth_draining,
)
from torchrelay.scheduler.policy.dispatch.open_attempts import BoundWork, OpenAttempt
from torchrelay.scheduler.policy.dispatch.placement import NoPlacement
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.transitions import dispatch, rosters

_UNANSWERED_S = 2.0  # a gateway that has not asked for another attempt by then may be told again
_MAX_COMPARED = 4  # answers of one instance whose tokens take too long
_LEAST_STEP_S = 1e-6


@dataclass(frozen=True, slots=True)
class _Source:
    """An instance that answers may leave. ``limit_s``: the longest time between tokens where they go."""

    instance_id: str
    worker_id: str
    model: Model
    work: BoundWork
    latency: LatencyModel
    tbt_s: float
    target_s: float
    limit_s: float


class _Move(NamedTuple):
    placement: Placement
    pause_s: float  # from its last token here to its next one there


def empty_draining(state: State, now: float) -> None:
    """Tells gateways which attempts are to leave instances that drain."""
    for instance in state.instances.draining:
        _empty(state, instance, now)


def rebalance(state: State, now: float, version_ids: Iterable[str]) -> None:
    """Tells gateways which attempts of these versions are to leave instances whose tokens take too long."""
    for version_id in sorted(version_ids):
        if (model := state.models.get(version_id)) is not None and not state.queues.num_waiting(version_id):
            _rebalance(state, model, now)


def admit(state: State, admission: Admission, now: float) -> None:
    """A gateway asks for the attempt that is to take over. It is placed at once or not at all: it never waits."""
    key = admission.key
    state.gateways.confirm(admission.gateway_id, key)
    if opened := state.attempts.get(key):  # the answer may have been lost with its stream
        state.effects.answers.append(effects.Placed(admission.gateway_id, opened.placement))
        return
    running, move = state.attempts.get(AttemptKey(key.request_id, admission.migrates)), None
    if running is not None and (source := _source_of(state, running, now)) is not None:
        move = _move(state, source, admission, now)
    if move is None:
        if running is not None:
            running.asked_to_migrate_at = None
        state.gateways.forget(key)
        message = "no other instance is a better place for the request"
        refusal = effects.AdmissionRefused(admission.gateway_id, key, effects.RefusalReason.NOT_MIGRATED, message)
        state.effects.answers.append(refusal)
        return
    dispatch.bind(state, admission, move.placement, now)


# Drains


def _empty(state: State, instance: Instance, now: float) -> None:
    """Migrate as many answers as end the drain sooner by more than their moves cost."""
    source = _source(state, instance, now)
    if source is None or not source.work.decodes or state.queues.num_waiting(instance.version_id):
        return
    attempts = source.work.decodes
    answers = [_answer(state, source, one, now) for one in attempts.values() if not _is_asked(one, now)]
    moves: dict[AttemptKey, _Move] = {}

    def cost_s(answer: RunningAnswer) -> float:
        move = _move_of(state, source, attempts[answer.key], answer, now)
        if move is None:
            return math.inf
        moves[answer.key] = move
        return move.pause_s + _share_s(source, attempts[answer.key]) * answer.num_left

    cut_off_s = max(state.config.drain_s - (now - instance.since), 0.0)
    leaving = worth_draining(answers, cost_s, source.work.queue.work_s(), cut_off_s, state.config.migration_gain_s)
    room = state.config.migrations_at_once - (len(attempts) - len(answers))
    asked_s: dict[str, float] = {}  # of prompts, by instance: more than a step of them finds no place
    entries = {entry.instance_id: entry for entry in rosters.roster(state, source.model, now)}
    for answer in leaving[: max(room, 0)]:
        placement = moves[answer.key].placement
        entry = entries[placement.prefill.instance_id]
        ahead_s = entry.queued_s(state.attempts.at(entry.instance_id).queue, now) + asked_s.get(entry.instance_id, 0.0)
        if ahead_s < entry.full_step_s:
            asked_s[entry.instance_id] = asked_s.get(entry.instance_id, 0.0) + placement.predicted.prefill_s
            why = f"{source.worker_id}, which drains, would have it for another {format_duration(answer.left_s)}"
            _ask(state, attempts[answer.key], why, moves[answer.key], now)


# Tokens that take too long


def _rebalance(state: State, model: Model, now: float) -> None:
    """Migrate one answer from each instance whose tokens exceed the target, if that gains most and enough."""
    roster = rosters.roster(state, model, now)
    decoding = [one.instance_id for one in roster if one.plays_decode and one.phase is InstancePhase.READY]
    if len(decoding) < 2 or not any(len(state.attempts.at(one).decodes) > 1 for one in decoding):
        return
    instances = [instance for one in decoding if (instance := state.instances.get(one)) is not None]
    sources = [source for one in instances if (source := _source(state, one, now)) is not None]
    late = [one for one in sources if one.tbt_s > one.target_s and len(one.work.decodes) > 1]
    if not late or len(late) == len(sources):
        return
    for source in sorted(late, key=lambda one: (-one.tbt_s, one.instance_id)):
        if not any(_is_asked(one, now) for one in source.work.decodes.values()):
            _relieve(state, source, now)


def _relieve(state: State, source: _Source, now: float) -> None:
    attempts = source.work.decodes
    answers = [_answer(state, source, one, now) for one in attempts.values()]
    found: list[tuple[float, AttemptKey, _Move]] = []
    movable = [one for one in answers if _is_movable(attempts[one.key])]
    for answer in sorted(movable, key=lambda one: (-one.num_left, one.key))[:_MAX_COMPARED]:
        others = [one for one in answers if one is not answer]
        share_s = _share_s(source, attempts[answer.key])
        gain_s = lateness_gain_s(answer, others, source.tbt_s, source.target_s, share_s)
        if gain_s > state.config.migration_gain_s:
            move = _move_of(state, source, attempts[answer.key], answer, now)
            if move is not None:
                found.append((gain_s - move.pause_s, answer.key, move))
    if not found:
        return
    gain_s, key, move = max(found, key=lambda one: one[:2])
    if gain_s > state.config.migration_gain_s:
        there = format_duration(move.placement.predicted.tbt_s)
        why = f"a token takes {format_duration(source.tbt_s)} on {source.worker_id}, {there} there"
        _ask(state, attempts[key], why, move, now)


# Both


def _source_of(state: State, attempt: OpenAttempt, now: float) -> _Source | None:
    """Where the attempt decodes, whatever is wrong with it there."""
    instance = state.instances.get(attempt.placement.decode.instance_id)
    return None if instance is None else _source(state, instance, now)


def _source(state: State, instance: Instance, now: float) -> _Source | None:
    """Answers may go where the target is met; if it drains, also where tokens take no longer than here."""
    model, worker = state.models.get(instance.version_id), state.membership.workers.get(instance.worker_id)
    if model is None or worker is None:
        return None
    work = state.attempts.at(instance.instance_id)
    latency = state.latency_models.of(worker, model.pack_id, state.config)
    step_s = latency.tbt_s(work.num_choices, work.num_attended)
    tbt_s = max(state.token_times.of(instance.instance_id, now).mean_s(step_s), _LEAST_STEP_S)
    target_s = state.tbt_target_s(model.version_id, now)
    limit_s = max(tbt_s, target_s) if instance.phase is InstancePhase.DRAINING else target_s
    return _Source(instance.instance_id, instance.worker_id, model, work, latency, tbt_s, target_s, limit_s)


def _answer(state: State, source: _Source, attempt: OpenAttempt, now: float) -> RunningAnswer:
    admission = attempt.admission
    passed_s = max(now - attempt.computed_at, 0.0) if attempt.is_computed else 0.0
    num_given = min(admission.num_forced_tokens + passed_s / source.tbt_s, admission.max_tokens)
    num_expected = state.answer_lengths.expected(admission.version_id, admission.max_tokens)
    num_left = num_tokens_left(num_given, num_expected, admission.max_tokens)
    return RunningAnswer(admission.key, num_given, num_left, source.tbt_s)


def _is_movable(attempt: OpenAttempt) -> bool:
    """Once per request, from its first token on; of several choices each would have to be prefilled by itself."""
    return attempt.is_computed and not attempt.admission.migrates and attempt.admission.num_choices == 1


def _is_asked(attempt: OpenAttempt, now: float) -> bool:
    """Whether its gateway was told, and has not asked for another attempt yet."""
    return attempt.asked_to_migrate_at is not None and now - attempt.asked_to_migrate_at < _UNANSWERED_S


def _move_of(state: State, source: _Source, attempt: OpenAttempt, answer: RunningAnswer, now: float) -> _Move | None:
    """As its gateway would ask for it."""
    if not _is_movable(attempt):
        return None
    moved = structs.replace(attempt.admission, num_forced_tokens=max(round(answer.num_given), 1))
    return _move(state, source, moved, now)


def _move(state: State, source: _Source, admission: Admission, now: float) -> _Move | None:
    """To another decode instance that is loaded, has room, and is as quick as it must be."""
    candidates = [
        structs.replace(one, entry=replace(one.entry, plays_decode=False))
        if one.entry.instance_id == source.instance_id
        else one
        for one in dispatch.candidates(state, admission, source.model, now)
    ]
    num_expected = state.answer_lengths.expected(admission.version_id, admission.max_tokens)
    found = state.strategies.place(
        admission, source.model, candidates, state.kv_transfer_times, state.config, now, num_expected
    )
    if isinstance(found, NoPlacement) or found.cold or found.predicted.tbt_s > source.limit_s:
        return None
    pause_s = found.predicted.ttft_s
    if found.needs_kv_transfer:
        workers = state.membership.workers
        prefill, decode = (workers[ref.worker_id].host_id for ref in (found.prefill, found.decode))
        kv_bytes = admission.num_prefill_tokens * source.model.kv_bytes_per_token
        pause_s += state.kv_transfer_times.predict_s(prefill, decode, kv_bytes, state.config.kv_bytes_per_s)
    return _Move(found, pause_s)


def _share_s(source: _Source, attempt: OpenAttempt) -> float:
    """Its own part of a step."""
    return source.latency.decode.marginal_s(attempt.admission.num_choices, attempt.num_attended)


def _ask(state: State, attempt: OpenAttempt, why: str, move: _Move, now: float) -> None:
    admission = attempt.admission
    attempt.asked_to_migrate_at = now
    state.effects.answers.append(effects.Migrate(admission.gateway_id, admission.key))
    reason = f"attempt {admission.key.attempt} moves to {move.placement.decode.worker_id}: {why}"
    event = effects.SchedulerEvent(now, "migrate", admission.model, admission.key.request_id, reason)
    state.effects.events.append(event)
