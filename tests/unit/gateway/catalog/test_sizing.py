"""Where a model fits, and the step times that are known for it."""

from __future__ import annotations

import pytest

from torchrelay.control.v1.reports_pb2 import LatencyModel, PackCopy, SlotState, StepCost, StoreReport, WorkerReport
from torchrelay.control.v1.scheduler_pb2 import ClusterView
from torchrelay.gateway.catalog.sizing import hosts_that_fit, learned_steps, sizing_shown
from torchrelay.modelspec.sizing.footprint import footprint_of_bytes
from torchrelay.modelspec.sizing.operating_point import Workload


def cost(base_s: float, num_steps: int) -> StepCost:
    return StepCost(base_s=base_s, per_position_s=base_s / 8, num_steps=num_steps)


def worker(worker_id: str, latency: LatencyModel, version: str = "own", weights_bytes: int = 0) -> WorkerReport:
    slot = SlotState(version_id=version, pack_id=f"pack-{version}")
    return WorkerReport(
        worker_id=worker_id,
        host_id=worker_id,
        kv_pool_bytes=10**6,
        weights_bytes=weights_bytes,
        slot=slot,
        latency=latency,
    )


PREFILL = LatencyModel(prefill=cost(0.02, 50), token_budget=512)
DECODE = LatencyModel(decode=cost(0.004, 9), token_budget=256)
COPIES = [PackCopy(pack_id="pack-own", pack_bytes=1000)]


def cluster(*workers: WorkerReport) -> ClusterView:
    stores = [StoreReport(host_id=each.worker_id, arena_target_bytes=2000, copies=COPIES) for each in workers]
    return ClusterView(workers=workers, stores=stores)


def test_costs_come_from_the_workers_that_know_them() -> None:
    """Workers in the role of prefill never learn what decoding costs."""
    view = cluster(worker("p", PREFILL), worker("d", DECODE), worker("idle", LatencyModel()))
    learned = learned_steps(view, "own", 1000)
    assert learned is not None
    steps, pool_bytes = learned
    assert (steps.prefill.base_s, steps.decode.base_s, steps.token_budget) == (0.02, 0.004, 512)
    assert (steps.origin, pool_bytes) == ("measured", 10**6)


def test_another_model_gives_an_estimate_by_the_weights() -> None:
    learned = learned_steps(cluster(worker("p", PREFILL), worker("d", DECODE)), "other", 3000)
    assert learned is not None
    assert learned[0].origin == "estimated" and learned[0].decode.base_s == pytest.approx(0.012)


def test_nothing_is_known_before_a_model_has_run() -> None:
    assert learned_steps(cluster(worker("p", PREFILL)), "own", 1000) is None
    assert learned_steps(ClusterView(), "own", 1000) is None


def test_hosts_fit_by_arena_and_device() -> None:
    view = cluster(*(worker(str(size), DECODE, weights_bytes=size) for size in (0, 500, 4000)))
    assert hosts_that_fit(view, 1000) == (2, 3)
    assert hosts_that_fit(view, 3000) == (0, 3)  # more than the arenas


def test_hosts_are_shown_to_operators_alone() -> None:
    model, work = footprint_of_bytes(1000, 2, 16, 512), Workload(1, 64, 32, float("inf"), float("inf"))
    view = cluster(worker("d", DECODE))
    shown = sizing_shown(model, view, "own", work, is_admin=True)
    assert shown["hosts"] == {"fit": 1, "total": 1}
    sizes = [point["num_choices"] for point in shown["curve"]]
    assert sizes[0] == 1 and len(sizes) > 3
    assert "hosts" not in sizing_shown(model, view, "own", work, is_admin=False)
    assert sizing_shown(model, None, "own", work, is_admin=True)["curve"] == []
