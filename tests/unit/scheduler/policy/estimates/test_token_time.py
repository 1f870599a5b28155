"""Times between tokens: the batch there is, the usual batch, and what was measured."""

from __future__ import annotations

import pytest

from torchrelay.scheduler.policy.estimates.token_time import TokenTimes


def test_instance_without_placement_has_no_correction() -> None:
    times = TokenTimes()
    times.observe("i", 0.01, 1.0, 0.02, now=0.0)
    assert times.of("i", now=0.0).mean_s(0.01) == 0.01


def test_usual_batch_counts_less_with_age() -> None:
    times = TokenTimes()
    times.placed("i", 0.01, now=0.0)
    assert times.of("i", now=0.0).mean_s(0.02) == pytest.approx(0.017)
    assert times.of("i", now=120.0).mean_s(0.02) == pytest.approx(0.0185)
    assert times.of("i", now=3600.0).mean_s(0.02) == pytest.approx(0.02)
    assert times.of("other", now=0.0).mean_s(0.02) == 0.02


def test_burst_does_not_change_usual_step() -> None:
    """Twenty placements at once were two thirds of it."""
    times = TokenTimes()
    for number in range(400):
        times.placed("i", 0.01, now=0.1 * number)
    for _ in range(20):
        times.placed("i", 0.04, now=40.0)
    assert times.of("i", now=40.0).mean_s(0.01) < 0.011
    for number in range(400):
        times.placed("i", 0.04, now=100.0 + 0.1 * number)
    assert times.of("i", now=140.0).mean_s(0.04) > 0.038


def test_slow_tokens_are_learned_until_instance_is_gone() -> None:
    times = TokenTimes()
    for _ in range(40):
        times.placed("i", 0.01, now=0.0)
        token_time = times.of("i", now=0.0)
        times.observe("i", token_time.mean_s(0.01), token_time.correction, 0.03, now=0.0)
    assert times.of("i", now=0.0).mean_s(0.01) == pytest.approx(0.03, rel=0.2)
    assert times.of("i", now=3600.0).mean_s(0.01) == pytest.approx(0.01, rel=0.01)
    times.forget("i")
    assert times.of("i", now=0.0).mean_s(0.01) == 0.01
