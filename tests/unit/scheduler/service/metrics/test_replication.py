"""Copies, counted and timed."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from torchrelay.scheduler.policy.effects import SchedulerEvent
from torchrelay.scheduler.service.metrics.replication import ReplicationMetrics


def test_copies_are_counted_and_timed() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    counted = ReplicationMetrics(provider.get_meter("test"), lambda: 4, lambda: 2)
    for kind, fields in (("rebuild", {}), ("copied", {"took_s": 1.5}), ("relay_finished", {"took_s": 9.0})):
        counted.note(SchedulerEvent(1.0, kind, "acme/tiny", "acme/tiny", "because", f"scale.{kind}", fields))
    found: dict[str, list[Any]] = {}
    data = reader.get_metrics_data()
    assert data is not None
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        found[metric.name] = list(metric.data.data_points)
    (started,), (took,) = found["torchrelay_scheduler_copies_started"], found["torchrelay_scheduler_copy_duration"]
    assert (started.value, started.attributes) == (1, {"cause": "rebuild"})
    assert (took.sum, took.attributes) == (1.5, {"failed": False})
    assert [point.value for point in found["torchrelay_scheduler_packs_under_replicated"]] == [4]
    assert [point.value for point in found["torchrelay_scheduler_copies_running"]] == [2]
    provider.shutdown()
