"""Predictions and outcomes of a recorded scheduler, from its log of inputs, which is applied again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from torchrelay.common.latency.latency_model import LatencyModel
from torchrelay.scheduler.policy.effects import AttemptPlaced
from torchrelay.scheduler.policy.inputs import Admit, Release, WorkerReported
from torchrelay.scheduler.policy.prediction import Outcome, Prediction
from torchrelay.scheduler.policy.types import Admission, AttemptKey
from torchrelay.scheduler.service.input_log import steps


@dataclass(frozen=True, slots=True)
class MeasuredAttempt:
    """An attempt that ended. Times are Unix seconds; ``latency`` is its decode worker's model at that time."""

    request_id: str
    decode_instance_id: str
    latency: LatencyModel
    num_choices: int
    num_prompt_tokens: int
    admitted_at: float
    placed_at: float
    ended_at: float
    is_cold: bool
    predicted: Prediction
    outcome: Outcome

    @property
    def decoded_from(self) -> float:
        """Time of the first token; ``decoded_until`` if there is at most one token."""
        num_steps = self.outcome.num_output_tokens / self.num_choices - 1
        return self.decoded_until - (self.outcome.tbt_s or 0.0) * num_steps

    @property
    def decoded_until(self) -> float:
        return self.outcome.ended_at or self.ended_at

    @property
    def num_attended(self) -> int:
        """Positions that a step in the middle of the answer attends to."""
        return self.num_choices * self.num_prompt_tokens + self.outcome.num_output_tokens // 2


@dataclass(frozen=True, slots=True)
class Record:
    """``num_free``: time of each input, and free places of the queue after it. ``step_errors``: by role, the error of
    the worker's own model for single steps.
    """

    attempts: list[MeasuredAttempt] = field(default_factory=list)  # in order of their end
    num_free: list[tuple[float, int]] = field(default_factory=list)
    step_errors: dict[str, float] = field(default_factory=dict)


def step_of_known_batches_s(attempt: MeasuredAttempt, attempts: Sequence[MeasuredAttempt]) -> float:
    """Mean decode step during the attempt's answer, of two tokens or more, by its worker's own model and the batches
    that ``attempts`` really formed. An oracle that knows all future requests, lengths and times could predict as much.
    """
    begin, end, instance_id = attempt.decoded_from, attempt.decoded_until, attempt.decode_instance_id
    beside = [each for each in attempts if each.decoded_from < end and each.decoded_until > begin]
    beside = [each for each in beside if each.decode_instance_id == instance_id]
    changes = {at for each in beside for at in (each.decoded_from, each.decoded_until) if begin < at < end}
    num_steps = 0.0
    for since, until in pairwise([begin, *sorted(changes), end]):
        batch = [each for each in beside if each.decoded_from <= since and each.decoded_until >= until]
        step_s = attempt.latency.tbt_s(
            sum(each.num_choices for each in batch), sum(each.num_attended for each in batch)
        )
        num_steps += (until - since) / step_s
    return (end - begin) / num_steps


def read_record(path: Path) -> Record:
    """Reads the record of a scheduler with requests for one version. Raises ``ValueError`` if there are more."""
    record, open_ = Record(), dict[AttemptKey, AttemptPlaced]()
    admissions: dict[AttemptKey, Admission] = {}
    latencies: dict[AttemptKey, LatencyModel] = {}
    for step in steps(path):
        state = step.policy.state
        if isinstance(step.input, Admit):
            admissions[step.input.admission.key] = step.input.admission
        for placed in step.effects.opened:
            open_[placed.key] = placed
            worker = state.membership.workers[placed.placement.decode.worker_id]
            pack_id = state.known_model(admissions[placed.key].version_id).pack_id
            latencies[placed.key] = state.latency_models.of(worker, pack_id, state.config)
        match step.input:
            case Release(key, _, outcome) if key in open_ and outcome is not None:
                attempt = _measured(open_.pop(key), outcome, admissions[key], latencies[key], step.now)
                record.attempts.append(attempt)
            case WorkerReported(worker) if worker.latency is not None:
                costs = {"prefill": worker.latency.prefill, "decode": worker.latency.decode}
                record.step_errors.update({role: cost.error for role, cost in costs.items() if cost.known})
        record.num_free.append((step.now, state.config.queue_limit - len(state.queues)))
    if len(versions := {admission.version_id for admission in admissions.values()}) > 1:
        raise ValueError(f"the record has requests for {len(versions)} versions; expected one")
    return record


def _measured(
    placed: AttemptPlaced, outcome: Outcome, admission: Admission, latency: LatencyModel, now: float
) -> MeasuredAttempt:
    placement = placed.placement
    return MeasuredAttempt(
        request_id=placed.key.request_id,
        decode_instance_id=placement.decode.instance_id,
        latency=latency,
        num_choices=admission.num_choices,
        num_prompt_tokens=admission.num_prompt_tokens,
        admitted_at=placed.admitted_at,
        placed_at=placed.placed_at,
        ended_at=now,
        is_cold=placement.cold,
        predicted=placement.predicted,
        outcome=outcome,
    )
