"""Prediction errors, transfers and copies, measured."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from tests.unit.scheduler.policy.paper_cluster import PaperCluster, a_model, a_store, a_worker, an_admission
from torchrelay.common.process.telemetry import BUCKETS_S
from torchrelay.scheduler.policy.effects import SchedulerEvent
from torchrelay.scheduler.policy.prediction import Outcome, Prediction
from torchrelay.scheduler.policy.types import AttemptKey, Placement, ServiceClass, WorkerRef
from torchrelay.scheduler.service.metrics import (
    AdmissionMetrics,
    RelayMetrics,
    ReplicationMetrics,
    SlotMetrics,
    TargetMetrics,
)


def test_prediction_errors_are_absolute() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    counted = AdmissionMetrics(provider.get_meter("test"), PaperCluster().policy.state, lambda: 0)
    seat = WorkerRef("w1", "10.0.0.1:1", "i-1")
    placement = Placement(AttemptKey("r1", 1), seat, seat, False, Prediction(0.2, 0.1, 0.02))
    counted.record_accuracy(placement, Outcome(ttft_s=0.3, tbt_s=0.021, ended_at=11.0))
    counted.record_accuracy(placement, Outcome(ttft_s=0.1, tbt_s=0.019, ended_at=11.0))
    data = reader.get_metrics_data()
    assert data is not None
    points: dict[str, Any] = {}
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        (points[metric.name],) = metric.data.data_points
    first, between = (
        points["torchrelay_scheduler_ttft_prediction_error"],
        points["torchrelay_scheduler_tbt_prediction_error"],
    )
    assert (first.count, first.sum) == (2, pytest.approx(0.2))
    assert (between.count, between.sum) == (2, pytest.approx(0.002))
    assert first.explicit_bounds == BUCKETS_S
    provider.shutdown()


def test_relays_are_counted_and_timed() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    counted = RelayMetrics(provider.get_meter("test"), lambda: 3)
    endings = ("relay.finished", {"took_s": 1.5}), ("copy.finished", {"took_s": 9.0})
    for event, fields in (("relay.started", {}), *endings):
        counted.note(SchedulerEvent(1.0, "kind", "acme/tiny", "store-a", "because", event, fields))
    points: dict[str, list[Any]] = {}
    data = reader.get_metrics_data()
    assert data is not None
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        points[metric.name] = list(metric.data.data_points)
    events = {point.attributes["event"]: point.value for point in points["torchrelay_scheduler_relay_events"]}
    assert events == {"started": 1, "finished": 1}
    (took,) = points["torchrelay_scheduler_relay_duration"]
    assert took.sum == 1.5 and took.attributes == {"event": "finished"}
    assert [point.value for point in points["torchrelay_scheduler_relays_running"]] == [3]
    provider.shutdown()


def test_copies_are_counted_and_timed() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    counted = ReplicationMetrics(provider.get_meter("test"), lambda: 4, lambda: 2)
    for kind, fields in (("rebuild", {}), ("copied", {"took_s": 1.5}), ("relay_finished", {"took_s": 9.0})):
        counted.note(SchedulerEvent(1.0, kind, "acme/tiny", "acme/tiny", "because", f"scale.{kind}", fields))
    points: dict[str, list[Any]] = {}
    data = reader.get_metrics_data()
    assert data is not None
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        points[metric.name] = list(metric.data.data_points)
    (started,), (took,) = points["torchrelay_scheduler_copies_started"], points["torchrelay_scheduler_copy_duration"]
    assert (started.value, started.attributes) == (1, {"cause": "rebuild"})
    assert (took.sum, took.attributes) == (1.5, {"failed": False})
    assert [point.value for point in points["torchrelay_scheduler_packs_under_replicated"]] == [4]
    assert [point.value for point in points["torchrelay_scheduler_copies_running"]] == [2]
    provider.shutdown()


def values_of(reader: InMemoryMetricReader, metric_name: str) -> dict[tuple[Any, ...], float]:
    """The values of a metric, by the values of its labels."""
    data = reader.get_metrics_data()
    assert data is not None
    metrics = {metric.name: metric for metric in data.resource_metrics[0].scope_metrics[0].metrics}
    points: list[Any] = list(metrics[metric_name].data.data_points)
    return {tuple(point.attributes.values()): point.value for point in points}


def test_requests_are_counted_against_their_targets() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    counted = TargetMetrics(provider.get_meter("test"))
    admission = an_admission(
        a_model(), "r1", ttft_target_s=1.0, tbt_target_s=0.1, service_class=ServiceClass.INTERACTIVE
    )
    for ttft_s, tbt_s in ((0.9, 0.09), (1.0, None), (1.1, 0.01), (0.5, 0.2), (0.0, None)):
        counted.ended(admission, ttft_s, tbt_s)
    resumed = an_admission(a_model(), "r2", 2, num_forced_tokens=3)
    counted.ended(resumed, 0.1, 0.01)
    counted.note(SchedulerEvent(1.0, "refuse", "acme/tiny", "acme/tiny", "too many requests wait"))
    counted.note(SchedulerEvent(1.0, "wake", "acme/tiny", "acme/tiny", "a request waits"))
    assert values_of(reader, "torchrelay_scheduler_target_requests") == {
        ("acme/tiny", "interactive", "met"): 2,
        ("acme/tiny", "interactive", "late"): 1,
        ("acme/tiny", "interactive", "slow"): 1,
        ("acme/tiny", "", "refused"): 1,
    }
    provider.shutdown()


def test_slots_instances_and_waiting_requests_are_read_from_the_state() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    scene = PaperCluster(obedient=False).settle(a_store("store-1", "host-1"), a_worker("w-a"), a_worker("w-b"))
    SlotMetrics(provider.get_meter("test"), scene.policy.state)
    AdmissionMetrics(provider.get_meter("test"), scene.policy.state, lambda: 0)
    scene.admit(a_model(), "r1")
    assert values_of(reader, "torchrelay_scheduler_instances") == {("acme/tiny", "loading", "prefill+decode"): 1}
    assert values_of(reader, "torchrelay_scheduler_pool_slots") == {("1", "have"): 2, ("1", "used"): 1}
    waiting = values_of(reader, "torchrelay_scheduler_requests_waiting")
    assert waiting == {("acme/tiny",): len(scene.policy.state.queues)}
    provider.shutdown()
