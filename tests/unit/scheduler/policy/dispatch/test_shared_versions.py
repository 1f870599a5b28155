"""A version of which two tenants have requests: a burst of one leaves room near the front to the other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.scheduler.policy.paper_cluster import a_model, a_store, a_worker
from tests.unit.scheduler.policy.running_cluster import CONFIG, RunningCluster
from torchrelay.common.latency.latency_model import LatencyModel, StepCost
from torchrelay.scheduler.policy.dispatch.shared_versions import SharedVersions, max_prompts_ahead
from torchrelay.scheduler.policy.effects import Placed


def num_placed_of_a_burst(other_tenant: str) -> int:
    """Of twenty short prompts at once, beside a chat of ``other_tenant``."""
    cluster, model = RunningCluster(CONFIG, load_s=1.0), a_model("acme/shared")
    others = replace(model, name=f"{other_tenant}/same files")
    cluster.settle(a_store("s", "host-0"), a_worker("w", "host-0"))
    warm = cluster.call("warm", others)
    while not warm.end:
        cluster.step()
    num_before = len(cluster.answers)
    cluster.call("chat", others, num_tokens=10)
    for number in range(20):
        cluster.call(f"r{number}", model, num_tokens=10)
    return sum(isinstance(one, Placed) for one in cluster.answers[num_before:])


def test_few_prompts_are_bound_ahead_of_another_tenants() -> None:
    assert num_placed_of_a_burst("other") == 2
    assert num_placed_of_a_burst("acme") == 8  # whose KV has room


@pytest.mark.parametrize(("base_s", "expected"), [(0.0, 2), (0.001, 2), (0.010, 6), (0.060, 40)])
def test_as_many_are_ahead_as_begin_within_the_fixed_time_of_two_steps(base_s: float, expected: int) -> None:
    assert max_prompts_ahead(LatencyModel(prefill=StepCost(base_s, num_steps=1))) == expected


def test_a_version_is_shared_for_two_seconds() -> None:
    versions = SharedVersions()
    versions.note("v", "a", 1.0)
    versions.note("v", "a", 2.0)
    assert not versions.is_shared("v", 2.0)
    versions.note("v", "b", 3.0)
    assert versions.is_shared("v", 3.5)
    assert not versions.is_shared("w", 3.5)
    assert not versions.is_shared("v", 5.0)
