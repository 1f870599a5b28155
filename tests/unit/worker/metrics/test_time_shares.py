"""Shares of the engine's time: their sum, their decay, and the bottleneck that they show."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torchrelay.engine.core import StepProfile
from torchrelay.worker.metrics.time_shares import NO_SHARES, TimeShares, bottleneck

seconds = st.floats(0, 10)
profiles = st.builds(StepProfile, seconds, seconds, seconds, seconds, seconds)


@given(st.lists(profiles, max_size=20))
@example([StepProfile(0.0, 0.0, 0.0, 0.0, 2.2e-311)])  # the reciprocal of such a number overflows
def test_shares_add_up_to_one(steps: list[StepProfile]) -> None:
    shares = NO_SHARES
    for step in steps:
        shares = shares.after(step)
    assert all(0 <= share <= 1 + 1e-9 for share in astuple(shares))
    expected = 1.0 if any(step.total_s for step in steps) else 0.0
    assert sum(astuple(shares)) == pytest.approx(expected)


def test_past_shares_decay_by_time_not_steps() -> None:
    cold = NO_SHARES.after(StepProfile(io_wait_s=10.0))
    assert cold == TimeShares(io_wait=1.0)
    warm = StepProfile(compute_s=0.01)
    shares = cold
    for _ in range(200):
        shares = shares.after(warm)
    assert shares.io_wait == pytest.approx(0.5) and shares.compute == pytest.approx(0.5)
    assert cold.after(StepProfile(compute_s=2.0)).io_wait == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("shares", "name"),
    [
        (NO_SHARES, ""),
        (TimeShares(compute=1.0), "compute"),
        (TimeShares(compute=0.71, memory=0.29), "compute"),
        (TimeShares(compute=0.6, memory=0.1, scheduling=0.3), "scheduling"),
        (TimeShares(compute=0.2, memory=0.35, kv_transfer=0.4, scheduling=0.05), "kv_transfer"),
        (TimeShares(compute=0.1, io_wait=0.9), "io_wait"),
        (TimeShares(compute=0.6, memory=0.2, scheduling=0.2), "compute"),
    ],
)
def test_bottleneck_of_shares(shares: TimeShares, name: str) -> None:
    assert bottleneck(shares) == name
