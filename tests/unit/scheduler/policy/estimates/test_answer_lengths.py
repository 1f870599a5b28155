"""Expected lengths of answers, and the times per token that follow from them."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.policy.paper_cluster import PaperCluster, a_model, a_store, a_worker
from torchrelay.common.latency.latency_model import LatencyModel, StepCost
from torchrelay.scheduler.policy.estimates.answer_lengths import AnswerLengths
from torchrelay.scheduler.policy.inputs import FirstToken, Release
from torchrelay.scheduler.policy.prediction import Outcome

MODEL = a_model(kv_bytes_per_token=64)
LATENCY = LatencyModel(StepCost(0.01, 1e-4, 0, 50), StepCost(0.005, 1e-4, 1e-6, 50))


def test_expected_length_is_mean_up_to_maximum() -> None:
    lengths = AnswerLengths()
    for _ in range(7):
        lengths.observe("v", 100.0)
    assert lengths.expected("v", 4096) == 4096, "seven say little"
    lengths.observe("v", 100.0)
    assert lengths.expected("v", 4096) == 100 and lengths.expected("v", 30) == 30
    assert lengths.expected("other", 4096) == 4096
    for _ in range(300):
        lengths.observe("v", 500.0)
    assert 490 <= lengths.expected("v", 4096) <= 500


def test_tbt_uses_mean_length_and_kv_the_maximum() -> None:
    """P10: every choice was taken to attend to all the positions that it may ever have."""
    scene = PaperCluster().settle(a_store("s1", "host-1"), a_worker("w", latency=LATENCY))
    scene.admit(MODEL, "cold")
    scene.finish_loads()
    scene.release("cold", delivered=False)
    attempts = scene.policy.state.attempts

    def predicted_step_s(request_id: str) -> float:
        """For a request that may have a very long answer, and then has one of 20 tokens for each of its choices."""
        admission = scene.admit(MODEL, request_id, max_tokens=100_000, num_choices=2)
        scene.apply(FirstToken(admission.key))
        placement = scene.placement(request_id)
        assert placement is not None
        assert attempts.at(placement.decode.instance_id).kv_bytes == admission.kv_bytes(MODEL)
        scene.apply(Release(admission.key, True, Outcome(num_output_tokens=40)))
        return placement.predicted.step_s

    steps_s = [predicted_step_s(f"r{number}") for number in range(9)]
    assert steps_s[:8] == pytest.approx([LATENCY.tbt_s(2, 2 * (100 + 50_000))] * 8)
    assert steps_s[8] == pytest.approx(LATENCY.tbt_s(2, 2 * (100 + 10)))
    scene.check()
