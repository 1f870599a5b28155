"""Prediction errors, transfers and copies, measured."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from torchrelay.common.process.telemetry import BUCKETS_S
from torchrelay.scheduler.policy.effects import SchedulerEvent
from torchrelay.scheduler.policy.prediction import Outcome, Prediction
from torchrelay.scheduler.policy.types import AttemptKey, Placement, WorkerRef
from torchrelay.scheduler.service.metrics import AdmissionMetrics, RelayMetrics, ReplicationMetrics


def test_prediction_errors_are_absolute() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    counted = AdmissionMetrics(provider.get_meter("test"), lambda: 0, lambda: 0)
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
