"""The factor of predicted times."""

from __future__ import annotations

import math
import random
from statistics import median

import pytest

from tests.unit.scheduler.policy.paper_cluster import a_model, two_hosts
from torchrelay.scheduler.policy.estimates.correction import TBT_WEIGHT, TTFT_WEIGHT, Corrections
from torchrelay.scheduler.policy.inputs import FirstToken
from torchrelay.scheduler.policy.types import AttemptKey


def test_slow_instance_is_corrected_within_bounds() -> None:
    corrections = Corrections(TTFT_WEIGHT)
    assert corrections.of("i", now=0.0) == 1.0
    corrections.observe("i", 1.0, 1.0, 2.0, now=0.0)
    assert 1.0 < corrections.of("i", now=0.0) < 2.0**0.15, "it may be chance"
    for _ in range(200):
        factor = corrections.of("i", now=0.0)
        corrections.observe("i", factor, factor, 100.0, now=0.0)
    assert corrections.of("i", now=0.0) == 8.0
    assert corrections.of("other", now=0.0) == 1.0


@pytest.mark.parametrize("true", [1.0, 1.5])
@pytest.mark.parametrize("weight", [TTFT_WEIGHT, TBT_WEIGHT])
def test_noise_is_not_corrected(true: float, weight: float) -> None:
    """Where steps take 40% more or less at random, the mean of the last few is itself off by 11%; that much was added
    to the error of each prediction.
    """
    rng, corrections, factors = random.Random(2), Corrections(weight), []
    for number in range(600):
        factor, now = corrections.of("i", number * 0.1), number * 0.1
        factors.append(factor)
        corrections.observe("i", factor, factor, true * math.exp(rng.gauss(0.0, 0.4)), now)
    assert median(abs(math.log(factor / true)) for factor in factors[100:]) < (0.02 if true == 1.0 else 0.1)


def test_late_measurements_are_corrected_once() -> None:
    """Thirty answers that were predicted at once, before a first one had ended, each added to the correction what all
    had in common: tokens were predicted to take twice as long as they did, some seconds later half as long, and so on.
    """
    corrections, factors = Corrections(TBT_WEIGHT), []
    in_flight: list[tuple[float, float]] = []
    for number in range(600):
        factor = corrections.of("i", number * 0.1)
        factors.append(factor)
        in_flight.append((factor, factor))
        if len(in_flight) > 30:
            corrections.observe("i", *in_flight.pop(0), 1.5, number * 0.1)
    assert max(factors) < 1.51 and factors[-1] == pytest.approx(1.5, rel=0.01)


@pytest.mark.parametrize("times", [3.0, 20.0])
def test_slower_worker_is_avoided_after_twenty_prompts(times: float) -> None:
    rng, corrections = random.Random(3), Corrections(TTFT_WEIGHT)
    for number in range(220):
        slow = times if number >= 200 else 1.0
        factor = corrections.of("i", number)
        corrections.observe("i", factor, factor, slow * math.exp(rng.gauss(0.0, 0.3)), number)
    assert corrections.of("i", 220.0) > 0.7 * min(times, 8.0)


def test_correction_fades_until_instance_is_tried_again() -> None:
    corrections = Corrections(TTFT_WEIGHT)
    for _ in range(200):
        factor = corrections.of("i", now=0.0)
        corrections.observe("i", factor, factor, 100.0, now=0.0)
    factors = [corrections.of("i", now) for now in (0.0, 120.0, 240.0, 3600.0)]
    assert factors == pytest.approx([8.0, 8.0**0.5, 8.0**0.25, 1.0], rel=1e-3)


def test_correction_ends_with_its_instance() -> None:
    scene = two_hosts()
    scene.admit(a_model(), "cold")
    scene.finish_loads()
    for request_id in ("cold", "slow"):
        if request_id == "slow":
            scene.admit(a_model(), request_id)
            scene.now += 5.0
        scene.apply(FirstToken(AttemptKey(request_id, 1)))
        scene.release(request_id)
    placement = scene.placement("slow")
    assert placement is not None
    corrections, instance_id = scene.policy.state.corrections, placement.prefill.instance_id
    assert corrections.of(instance_id, scene.now) > 1.0
    scene.kill(placement.prefill.worker_id)
    assert corrections.of(instance_id, scene.now) == 1.0
