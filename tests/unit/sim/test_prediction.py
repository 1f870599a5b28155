"""Predictions of the scheduler's own policy in virtual time; the remaining errors cannot be known beforehand."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count
from statistics import median

import msgspec
import pytest

from torchrelay.common.latency.latency_model import LatencyModel, StepCost
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.effects import AttemptPlaced, Effects
from torchrelay.scheduler.policy.inputs import Input, Release, WorkerReported
from torchrelay.scheduler.policy.policy import Policy
from torchrelay.scheduler.policy.prediction import Outcome, Prediction
from torchrelay.scheduler.policy.types import Role
from torchrelay.sim.plant import Plant
from torchrelay.sim.scenario import Fleet, Request, ServedModel

LATENCY = LatencyModel(StepCost(0.006, 2.5e-4, 1e-7, 1000), StepCost(0.004, 6e-4, 4e-7, 1000), 512)
MODEL = ServedModel("t/m", 1, 33 << 20, 8, 8192, LATENCY, 0.5, 4000, 0.1)
APART, BOTH = (1, 1), (1,)  # slots
CAPACITY_PER_S = {APART: 14.5, BOTH: 9.2}  # of the requests below


class RecordingPolicy(Policy):
    """Records predictions and measurements of all attempts except the first, which waits for a load. Its workers prefer
    one role each, alternately, as `torchrelay up` starts them.
    """

    def __init__(self) -> None:
        ids = count()
        super().__init__(PolicyConfig(idle_timeout_s=1e9), lambda: f"i{next(ids)}", 1000.0)
        self.recorded: list[tuple[Prediction, Outcome]] = []
        self._open: dict[str, AttemptPlaced] = {}
        self._preferred: dict[str, Role] = {}

    def apply(self, input_: Input, now: float) -> Effects:
        if isinstance(input_, WorkerReported):
            worker = input_.worker
            role = self._preferred.setdefault(worker.worker_id, tuple(Role)[len(self._preferred) % 2])
            input_ = msgspec.structs.replace(input_, worker=replace(worker, preferred_role=role))
        caused = super().apply(input_, now)
        self._open |= {placed.key.request_id: placed for placed in caused.opened}
        if isinstance(input_, Release) and input_.outcome is not None:
            placement = self._open.pop(input_.key.request_id).placement
            if not placement.cold:
                self.recorded.append((placement.predicted, input_.outcome))
        return caused


def predictions(slots: tuple[int, ...], load: float) -> list[tuple[Prediction, Outcome]]:
    """Predictions and outcomes of requests of random lengths at random times, over a minute."""
    rng, at = random.Random(1), 5.0
    requests = [Request("first", 0.0, MODEL.name, 100, 20)]
    while (at := at + rng.expovariate(load * CAPACITY_PER_S[slots])) < 65.0:
        lengths = round(64 * 8 ** rng.random()), rng.randint(16, 96)
        requests.append(Request(f"{at}", at, MODEL.name, *lengths))
    policy = RecordingPolicy()
    Plant(policy, Fleet(1, slots, 1e9, 1e9, 1e9, 1 << 30), [MODEL]).run(requests)
    assert len(policy.recorded) > 100
    return policy.recorded


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_median_ttft_error_within_tenth(load: float) -> None:
    recorded = predictions(APART, load)
    assert median(abs(o.ttft_s - p.ttft_s) / o.ttft_s for p, o in recorded if o.ttft_s) <= 0.11


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_tbt_prediction_follows_changing_batch(load: float) -> None:
    """Regression: tokens were predicted from the batch at placement alone, with a median error of 8 to 13%."""
    measured = [(p, o.tbt_s) for p, o in predictions(APART, load) if o.tbt_s]
    at_first = median(abs(tbt_s - p.step_s) / tbt_s for p, tbt_s in measured)
    assert median(abs(tbt_s - p.tbt_s) / tbt_s for p, tbt_s in measured) <= min(0.92 * at_first, 0.12)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_tbt_prediction_includes_interrupting_prompts(load: float) -> None:
    """Regression: predictions for a worker of both roles ignored prompts; tokens took 1.1 to 1.8 times as long."""
    recorded = predictions(BOTH, load)
    assert median(o.tbt_s / p.tbt_s for p, o in recorded if o.tbt_s) == pytest.approx(1.0, abs=0.12)
