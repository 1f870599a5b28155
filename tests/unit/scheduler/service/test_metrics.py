"""Prediction errors, transfers and copies, measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from tests.unit.scheduler.policy.paper_cluster import PaperCluster, a_copy, a_model, a_store, a_worker, an_admission
from torchrelay.common.process.telemetry import BUCKETS_S
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.effects import SchedulerEvent
from torchrelay.scheduler.policy.prediction import Outcome, Prediction
from torchrelay.scheduler.policy.types import AttemptKey, Placement, ServiceClass, WorkerRef
from torchrelay.scheduler.service.metrics import SchedulerMetrics


class Metrics:
    """What was measured with ``meter``."""

    def __init__(self, meter: Meter, reader: InMemoryMetricReader) -> None:
        self.meter, self._reader = meter, reader

    def points(self, name: str) -> list[Any]:
        data = self._reader.get_metrics_data()
        assert data is not None
        metrics = {metric.name: metric for metric in data.resource_metrics[0].scope_metrics[0].metrics}
        return list(metrics[f"torchrelay_scheduler_{name}"].data.data_points)

    def values(self, name: str) -> dict[tuple[Any, ...], float]:
        """By the values of the labels."""
        return {tuple(point.attributes.values()): point.value for point in self.points(name)}

    def sums(self, name: str) -> dict[tuple[Any, ...], float]:
        return {tuple(point.attributes.values()): point.sum for point in self.points(name)}


@pytest.fixture
def measured() -> Iterator[Metrics]:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    yield Metrics(provider.get_meter("test"), reader)
    provider.shutdown()


def an_event(kind: str, topic: str = "", **fields: float) -> SchedulerEvent:
    return SchedulerEvent(1.0, kind, "acme/tiny", "acme/tiny", "because", topic, fields)


def count(measured: Metrics, scene: PaperCluster | None = None) -> SchedulerMetrics:
    return SchedulerMetrics(measured.meter, (scene or PaperCluster()).policy.state, lambda: 0)


SEAT = WorkerRef("w1", "10.0.0.1:1", "i-1")
PLACEMENT = Placement(AttemptKey("r1", 1), SEAT, SEAT, False, Prediction(0.2, 0.1, 0.02))


def test_prediction_errors_are_absolute(measured: Metrics) -> None:
    counted = count(measured)
    for ttft_s, tbt_s in ((0.3, 0.021), (0.1, 0.019)):
        counted.ended(an_admission(a_model(), "r1"), PLACEMENT, Outcome(ttft_s, tbt_s, ended_at=11.0), ttft_s)
    (first,), (between,) = (measured.points(f"{name}_prediction_error") for name in ("ttft", "tbt"))
    assert (first.count, first.sum) == (2, pytest.approx(0.2))
    assert (between.count, between.sum) == (2, pytest.approx(0.002))
    assert first.explicit_bounds == BUCKETS_S


def test_relays_are_counted_and_timed(measured: Metrics) -> None:
    counted = count(measured)
    counted.note(an_event("kind", "relay.started"))
    counted.note(an_event("kind", "relay.finished", took_s=1.5))
    counted.note(an_event("kind", "copy.finished", took_s=9.0))
    assert measured.values("relay_events") == {("started",): 1, ("finished",): 1}
    assert measured.sums("relay_duration") == {("finished",): 1.5}


def test_copies_are_counted_and_timed(measured: Metrics) -> None:
    counted = count(measured)
    for kind, fields in (("rebuild", {}), ("copied", {"took_s": 1.5}), ("relay_finished", {"took_s": 9.0})):
        counted.note(an_event(kind, f"scale.{kind}", **fields))
    assert measured.values("copies_started") == {("rebuild",): 1}
    assert measured.sums("copy_duration") == {(False,): 1.5}


def test_requests_are_counted_against_their_targets(measured: Metrics) -> None:
    counted = count(measured)
    targets: dict[str, Any] = {"ttft_target_s": 1.0, "tbt_target_s": 0.1}
    admission = an_admission(a_model(), "r1", service_class=ServiceClass.INTERACTIVE, **targets)
    for ttft_s, tbt_s in ((0.9, 0.09), (1.0, None), (1.1, 0.01), (0.5, 0.2), (0.0, None)):
        counted.ended(admission, PLACEMENT, Outcome(None, tbt_s, ended_at=11.0), ttft_s)
    resumed = an_admission(a_model(), "r2", 2, num_forced_tokens=3)
    counted.ended(resumed, PLACEMENT, Outcome(None, 0.01, ended_at=11.0), 0.1)
    counted.note(an_event("refuse"))
    counted.note(an_event("wake"))
    assert measured.values("target_requests") == {
        ("acme/tiny", "interactive", "met"): 2,
        ("acme/tiny", "interactive", "late"): 1,
        ("acme/tiny", "interactive", "slow"): 1,
        ("acme/tiny", "", "refused"): 1,
    }


def test_slots_instances_transfers_and_waiting_requests_are_read_from_the_state(measured: Metrics) -> None:
    scene = PaperCluster(obedient=False).settle(a_store("store-1", "host-1"), a_worker("w-a"), a_worker("w-b"))
    count(measured, scene)
    scene.admit(a_model(), "r1")
    assert measured.values("instances") == {("acme/tiny", "loading", "prefill+decode"): 1}
    assert measured.values("pool_slots") == {("1", "have"): 2, ("1", "used"): 1}
    assert measured.values("requests_waiting") == {("acme/tiny",): len(scene.policy.state.queues)}
    assert measured.values("relays_running") == {(): 1}


def test_copies_under_way_are_read_from_the_state(measured: Metrics) -> None:
    model = a_model()
    scene = PaperCluster(PolicyConfig(replicate=True), obedient=False)
    count(measured, scene)
    scene.settle(a_store("s1", "h1", [a_copy(model)]), a_store("s2", "h2"), a_worker("w", "h1"))
    scene.admit(model, "r1")
    scene.pass_time(1.0)
    assert measured.values("packs_under_replicated") == {(): 1} and measured.values("copies_running") == {(): 1}
