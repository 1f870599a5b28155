"""What a recorded scheduler predicted, and what came of it: its log of inputs, applied once more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from torchrelay.common.latency.latency_model import LatencyModel
from torchrelay.scheduler.policy.core import Admission, AttemptKey
from torchrelay.scheduler.policy.effects import AttemptPlaced
from torchrelay.scheduler.policy.inputs import Admit, Release, WorkerReported
from torchrelay.scheduler.policy.prediction import Outcome, Prediction
from torchrelay.scheduler.service.input_log import steps


@dataclass(frozen=True, slots=True)
class MeasuredAttempt:
    """An attempt that ended. Times are Unix seconds. ``latency``: of its decode worker, as it was known then."""

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
        """``decoded_until`` if it has one token at most."""
        num_steps = self.outcome.num_output_tokens / self.num_choices - 1
        return self.decoded_until - (self.outcome.tbt_s or 0.0) * num_steps

    @property
    def decoded_until(self) -> float:
        return self.outcome.ended_at or self.ended_at

    @property
    def num_attended(self) -> int:
        """By a step in the middle of its answer."""
        return self.num_choices * self.num_prompt_tokens + self.outcome.num_output_tokens // 2


@dataclass(frozen=True, slots=True)
class Record:
    """``num_free``: places of the queue that nobody has, after each input, with its time. ``step_errors``: by role, how
    far single steps were off from what their own worker had learned of such steps.
    """

    attempts: list[MeasuredAttempt] = field(default_factory=list)  # by their end
    num_free: list[tuple[float, int]] = field(default_factory=list)
    step_errors: dict[str, float] = field(default_factory=dict)


def step_of_known_batches_s(attempt: MeasuredAttempt, attempts: Sequence[MeasuredAttempt]) -> float:
    """The mean decode step while its answer ran, by its worker's own model, of the batches of ``attempts`` that really
    came: what an oracle could predict that knows all requests to come, their lengths, and when each begins and ends.
    Of an attempt with two tokens or more.
    """
    begin, end, instance_id = attempt.decoded_from, attempt.decoded_until, attempt.decode_instance_id
    beside = [one for one in attempts if one.decoded_from < end and one.decoded_until > begin]
    beside = [one for one in beside if one.decode_instance_id == instance_id]
    changes = {at for one in beside for at in (one.decoded_from, one.decoded_until) if begin < at < end}
    num_steps = 0.0
    for since, until in pairwise([begin, *sorted(changes), end]):
        batch = [one for one in beside if one.decoded_from <= since and one.decoded_until >= until]
        step_s = attempt.latency.tbt_s(sum(one.num_choices for one in batch), sum(one.num_attended for one in batch))
        num_steps += (until - since) / step_s
    return (end - begin) / num_steps


def read_record(path: Path) -> Record:
    """Of a scheduler of which one version was asked. Raises ``ValueError`` if there were others."""
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
            pack_id = state.models[admissions[placed.key].version_id].pack_id
            latencies[placed.key] = state.latency_models.of(worker, pack_id, state.config)
        match step.input:
            case Release(key, _, outcome) if key in open_ and outcome is not None:
                attempt = _measured(open_.pop(key), outcome, admissions[key], latencies[key], step.now)
                record.attempts.append(attempt)
            case WorkerReported(worker) if worker.latency is not None:
                costs = {"prefill": worker.latency.prefill, "decode": worker.latency.decode}
                record.step_errors.update({role: cost.error for role, cost in costs.items() if cost.known})
        record.num_free.append((step.now, state.config.queue_limit - len(state.queues)))
    if len(versions := {one.version_id for one in admissions.values()}) > 1:
        raise ValueError(f"{len(versions)} versions were asked")
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
