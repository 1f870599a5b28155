"""What a recorded scheduler predicted, and what came of it: its log of inputs, applied once more."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from torchrelay.scheduler.policy.core import AttemptKey
from torchrelay.scheduler.policy.effects import AttemptPlaced
from torchrelay.scheduler.policy.inputs import Admit, Release, WorkerReported
from torchrelay.scheduler.policy.prediction import Outcome, Prediction
from torchrelay.scheduler.service.input_log import steps


@dataclass(frozen=True, slots=True)
class MeasuredAttempt:
    """An attempt that ended. Times are Unix seconds."""

    request_id: str
    num_prompt_tokens: int
    admitted_at: float
    placed_at: float
    ended_at: float
    is_cold: bool
    predicted: Prediction
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Record:
    """``num_free``: places of the queue that nobody has, after each input, with its time. ``step_errors``: by role, how
    far single steps were off from what their own worker had learned of such steps.
    """

    attempts: list[MeasuredAttempt] = field(default_factory=list)  # by their end
    num_free: list[tuple[float, int]] = field(default_factory=list)
    step_errors: dict[str, float] = field(default_factory=dict)


def read_record(path: Path) -> Record:
    """Of a scheduler of which one version was asked. Raises ``ValueError`` if there were others."""
    record, open_ = Record(), dict[AttemptKey, AttemptPlaced]()
    lengths: dict[AttemptKey, int] = {}
    versions: set[str] = set()
    for step in steps(path):
        open_ |= {placed.key: placed for placed in step.effects.opened}
        state = step.policy.state
        match step.input:
            case Admit(admission):
                lengths[admission.key] = admission.num_prompt_tokens
                versions.add(admission.version_id)
            case Release(key, _, outcome) if key in open_ and outcome is not None:
                record.attempts.append(_measured(open_.pop(key), outcome, lengths[key], step.now))
            case WorkerReported(worker) if worker.latency is not None:
                costs = {"prefill": worker.latency.prefill, "decode": worker.latency.decode}
                record.step_errors.update({role: cost.error for role, cost in costs.items() if cost.known})
        record.num_free.append((step.now, state.config.queue_limit - len(state.queues)))
    if len(versions) > 1:
        raise ValueError(f"{len(versions)} versions were asked")
    return record


def _measured(placed: AttemptPlaced, outcome: Outcome, num_prompt_tokens: int, now: float) -> MeasuredAttempt:
    placement = placed.placement
    return MeasuredAttempt(
        request_id=placed.key.request_id,
        num_prompt_tokens=num_prompt_tokens,
        admitted_at=placed.admitted_at,
        placed_at=placed.placed_at,
        ended_at=now,
        is_cold=placement.cold,
        predicted=placement.predicted,
        outcome=outcome,
    )
