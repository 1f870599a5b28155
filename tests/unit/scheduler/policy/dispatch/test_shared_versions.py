"""How long a version counts as shared, and how many prompts may be ahead then."""

from __future__ import annotations

import pytest

from torchrelay.common.latency.latency_model import LatencyModel, StepCost
from torchrelay.scheduler.policy.dispatch.shared_versions import SharedVersions, max_prompts_ahead


@pytest.mark.parametrize(("base_s", "expected"), [(0.0, 2), (0.001, 2), (0.010, 6), (0.060, 40)])
def test_prompts_ahead_begin_within_two_fixed_step_times(base_s: float, expected: int) -> None:
    assert max_prompts_ahead(LatencyModel(prefill=StepCost(base_s, num_steps=1))) == expected


def test_version_is_shared_for_two_seconds() -> None:
    versions = SharedVersions()
    versions.note("v", "a", 1.0)
    versions.note("v", "a", 2.0)
    assert not versions.is_shared("v", 2.0)
    versions.note("v", "b", 3.0)
    assert versions.is_shared("v", 3.5)
    assert not versions.is_shared("w", 3.5)
    assert not versions.is_shared("v", 5.0)
