"""Migration of running answers to another instance: to empty a draining instance, or to relieve one whose tokens take
too long.

The answer's gateway asks for another attempt and lets the running one continue until the new one is placed.
``dispatch/migration_gain.py`` decides which answers move. Waiting prompts come first: no answer of a version moves
while a prompt of the version waits.
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
_MAX_COMPARED = 4  # answers that are compared per instance whose tokens take too long
_LEAST_STEP_S = 1e-6


@dataclass(frozen=True, slots=True)
class _Source:
    """An instance that answers may leave. ``limit_s``: the longest time between tokens that their target may have."""

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
    pause_s: float  # from the answer's last token on the source to its next token on the target


def empty_draining(state: State, now: float) -> None:
    """Asks gateways to migrate attempts away from draining instances."""
    for instance in state.instances.draining:
        _empty(state, instance, now)


def rebalance(state: State, now: float, version_ids: Iterable[str]) -> None:
    """Asks gateways to migrate attempts of these versions away from instances whose tokens take too long."""
    for version_id in sorted(version_ids):
        if (model := state.models.get(version_id)) is not None and not state.queues.num_waiting(version_id):
            _rebalance(state, model, now)


def admit(state: State, admission: Admission, now: float) -> None:
    """Places the attempt that continues a running answer, at once or not at all: it never waits."""
    key = admission.key
    state.gateways.confirm(admission.gateway_id, key)
    if opened := state.attempts.get(key):  # the reply may have been lost with its stream
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
    answers = [_answer(state, source, attempt, now) for attempt in attempts.values() if not _is_asked(attempt, now)]
    moves: dict[AttemptKey, _Move] = {}

    def cost_s(answer: RunningAnswer) -> float:
        move = _move_of(state, source, attempts[answer.key], answer, now)
        if move is None:
            return math.inf
        moves[answer.key] = move
        return move.pause_s + _share_s(source, attempts[answer.key]) * answer.num_left

    cut_off_s = max(state.config.drain_s - (now - instance.since), 0.0)
    leaving = worth_draining(answers, cost_s, source.work.queue.work_s(), cut_off_s, state.config.migration_gain_s)
    num_free = state.config.migrations_at_once - (len(attempts) - len(answers))
    asked_s: dict[str, float] = {}  # prefill time asked of each instance, which is at most one step
    entries = {entry.instance_id: entry for entry in rosters.roster(state, source.model, now)}
    for answer in leaving[: max(num_free, 0)]:
        placement = moves[answer.key].placement
        entry = entries[placement.prefill.instance_id]
        ahead_s = entry.queued_s(state.attempts.at(entry.instance_id).queue, now) + asked_s.get(entry.instance_id, 0.0)
        if ahead_s < entry.full_step_s:
            asked_s[entry.instance_id] = asked_s.get(entry.instance_id, 0.0) + placement.predicted.prefill_s
            why = f"{source.worker_id} is draining and would take another {format_duration(answer.left_s)}"
            _ask(state, attempts[answer.key], why, moves[answer.key], now)


# Tokens that take too long


def _rebalance(state: State, model: Model, now: float) -> None:
    """Migrates the answer with the largest gain, if that suffices, from each instance whose tokens miss the target."""
    roster = rosters.roster(state, model, now)
    decoding = [  # including instances that gave up decode and whose answers go on
        entry.instance_id
        for entry in roster
        if entry.phase is InstancePhase.READY and (entry.plays_decode or state.attempts.at(entry.instance_id).decodes)
    ]
    if len(decoding) < 2 or not any(len(state.attempts.at(instance_id).decodes) > 1 for instance_id in decoding):
        return
    instances = [instance for instance_id in decoding if (instance := state.instances.get(instance_id)) is not None]
    sources = [source for instance in instances if (source := _source(state, instance, now)) is not None]
    late = [source for source in sources if source.tbt_s > source.target_s and len(source.work.decodes) > 1]
    if not late or len(late) == len(sources):
        return
    for source in sorted(late, key=lambda source: (-source.tbt_s, source.instance_id)):
        if not any(_is_asked(attempt, now) for attempt in source.work.decodes.values()):
            _relieve(state, source, now)


def _relieve(state: State, source: _Source, now: float) -> None:
    attempts = source.work.decodes
    answers = [_answer(state, source, attempt, now) for attempt in attempts.values()]
    moves: list[tuple[float, AttemptKey, _Move]] = []
    movable = [answer for answer in answers if _is_movable(attempts[answer.key])]
    for answer in sorted(movable, key=lambda answer: (-answer.num_left, answer.key))[:_MAX_COMPARED]:
        others = [other for other in answers if other is not answer]
        share_s = _share_s(source, attempts[answer.key])
        gain_s = lateness_gain_s(answer, others, source.tbt_s, source.target_s, share_s)
        if gain_s > state.config.migration_gain_s:
            move = _move_of(state, source, attempts[answer.key], answer, now)
            if move is not None:
                moves.append((gain_s - move.pause_s, answer.key, move))
    if not moves:
        return
    gain_s, key, move = max(moves, key=lambda move: move[:2])
    if gain_s > state.config.migration_gain_s:
        there = format_duration(move.placement.predicted.tbt_s)
        why = f"a token takes {format_duration(source.tbt_s)} on {source.worker_id}, {there} there"
        _ask(state, attempts[key], why, move, now)


# Both


def _source_of(state: State, attempt: OpenAttempt, now: float) -> _Source | None:
    """The instance where the attempt decodes."""
    instance = state.instances.get(attempt.placement.decode.instance_id)
    return None if instance is None else _source(state, instance, now)


def _source(state: State, instance: Instance, now: float) -> _Source | None:
    """The instance as a source of migrations. Answers may move where the target is met; from a draining instance, also
    where tokens take no longer than here.
    """
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
    """Whether the attempt may migrate: once per request, after its first token, and only with a single choice, because
    each of several choices would need a prefill of its own.
    """
    return attempt.is_computed and not attempt.admission.migrates and attempt.admission.num_choices == 1


def _is_asked(attempt: OpenAttempt, now: float) -> bool:
    """Whether the gateway was asked to migrate the attempt and has not answered yet."""
    return attempt.asked_to_migrate_at is not None and now - attempt.asked_to_migrate_at < _UNANSWERED_S


def _move_of(state: State, source: _Source, attempt: OpenAttempt, answer: RunningAnswer, now: float) -> _Move | None:
    """The move of a running attempt, as its gateway would ask for it; None if no target suits."""
    if not _is_movable(attempt):
        return None
    moved = structs.replace(attempt.admission, num_forced_tokens=max(round(answer.num_given), 1))
    return _move(state, source, moved, now)


def _move(state: State, source: _Source, admission: Admission, now: float) -> _Move | None:
    """A move to another decode instance that is loaded, has KV for the answer and meets ``limit_s``; None without
    one.
    """
    candidates = [
        structs.replace(candidate, entry=replace(candidate.entry, plays_decode=False))
        if candidate.entry.instance_id == source.instance_id
        else candidate
        for candidate in dispatch.candidates(state, admission, source.model, now)
    ]
    num_expected = state.answer_lengths.expected(admission.version_id, admission.max_tokens)
    placement = state.strategies.place(
        admission, source.model, candidates, state.kv_transfer_times, state.config, now, num_expected
    )
    if isinstance(placement, NoPlacement) or placement.cold or placement.predicted.tbt_s > source.limit_s:
        return None
    pause_s = placement.predicted.ttft_s
    if placement.needs_kv_transfer:
        workers = state.membership.workers
        prefill, decode = (workers[ref.worker_id].host_id for ref in (placement.prefill, placement.decode))
        kv_bytes = admission.num_prefill_tokens * source.model.kv_bytes_per_token
        pause_s += state.kv_transfer_times.predict_s(prefill, decode, kv_bytes, state.config.kv_bytes_per_s)
    return _Move(placement, pause_s)


def _share_s(source: _Source, attempt: OpenAttempt) -> float:
    """The attempt's part of a decode step."""
    return source.latency.decode.marginal_s(attempt.admission.num_choices, attempt.num_attended)


def _ask(state: State, attempt: OpenAttempt, why: str, move: _Move, now: float) -> None:
    admission = attempt.admission
    attempt.asked_to_migrate_at = now
    state.effects.answers.append(effects.Migrate(admission.gateway_id, admission.key))
    reason = f"attempt {admission.key.attempt} moves to {move.placement.decode.worker_id}: {why}"
    event = effects.SchedulerEvent(now, "migrate", admission.model, admission.key.request_id, reason)
    state.effects.events.append(event)
