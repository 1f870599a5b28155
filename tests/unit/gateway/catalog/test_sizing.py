"""Where a model fits, and the step times that are known for it."""

from __future__ import annotations

import pytest

from torchrelay.control.v1.reports_pb2 import LatencyModel, PackCopy, StepCost, StoreReport, WorkerReport
from torchrelay.control.v1.scheduler_pb2 import ClusterView, VersionView
from torchrelay.gateway.catalog.sizing import hosts_that_fit, learned_steps, sizing_shown
from torchrelay.modelspec.sizing.footprint import footprint_of_bytes
from torchrelay.modelspec.sizing.operating_point import Workload


def cost(base_s: float, num_steps: int) -> StepCost:
    return StepCost(base_s=base_s, per_position_s=base_s / 8, num_steps=num_steps)


def worker(worker_id: str, weights_bytes: int = 0) -> WorkerReport:
    return WorkerReport(worker_id=worker_id, host_id=worker_id, kv_pool_bytes=10**6, weights_bytes=weights_bytes)


LEARNED = LatencyModel(prefill=cost(0.02, 50), decode=cost(0.004, 9), token_budget=512)
COPIES = [PackCopy(pack_id="pack-own", pack_bytes=1000)]


def cluster(*workers: WorkerReport, latency: LatencyModel | None = None) -> ClusterView:
    stores = [StoreReport(host_id=each.worker_id, arena_target_bytes=2000, copies=COPIES) for each in workers]
    version = VersionView(version_id="own", pack_id="pack-own", models=["acme/own"], latency=latency)
    return ClusterView(workers=workers, stores=stores, versions=[version])


def test_costs_are_those_learned_with_the_version() -> None:
    """Also while it is at zero."""
    steps = learned_steps(cluster(worker("w"), latency=LEARNED), "own", 1000, None)
    assert steps is not None and steps.origin == "measured"
    assert (steps.prefill.base_s, steps.decode.base_s, steps.token_budget) == (0.02, 0.004, 512)


def test_another_model_gives_an_estimate_by_the_weights_to_its_tenant() -> None:
    view = cluster(worker("w"), latency=LEARNED)
    for own_versions in (None, {"own"}):
        steps = learned_steps(view, "other", 3000, own_versions)
        assert steps is not None and steps.origin == "estimated"
        assert steps.decode.base_s == pytest.approx(0.012)
    assert learned_steps(view, "other", 3000, {"other"}) is None, "it would tell of another tenant's models"


def test_nothing_is_known_before_a_model_has_run() -> None:
    prefilled = LatencyModel(prefill=cost(0.02, 50), token_budget=512)
    assert learned_steps(cluster(worker("w"), latency=prefilled), "own", 1000, None) is None
    assert learned_steps(ClusterView(), "own", 1000, None) is None


def test_hosts_fit_by_arena_and_device() -> None:
    view = cluster(*(worker(str(size), size) for size in (0, 500, 4000)))
    assert hosts_that_fit(view, 1000) == (2, 3)
    assert hosts_that_fit(view, 3000) == (0, 3)  # more than the arenas


def test_hosts_are_shown_to_operators_alone() -> None:
    model, work = footprint_of_bytes(1000, 2, 16, 512), Workload(1, 64, 32, float("inf"), float("inf"))
    view = cluster(worker("w"), latency=LEARNED)
    shown = sizing_shown(model, view, "own", work, None)
    assert shown["hosts"] == {"fit": 1, "total": 1}
    sizes = [point["num_choices"] for point in shown["curve"]]
    assert sizes[0] == 1 and len(sizes) > 3
    assert "hosts" not in sizing_shown(model, view, "own", work, {"own"})
    assert sizing_shown(model, None, "own", work, None)["curve"] == []
