"""Transfers, counted and timed."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from torchrelay.scheduler.policy.effects import SchedulerEvent
from torchrelay.scheduler.service.metrics.relay import RelayMetrics


def test_relays_are_counted_and_timed() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    counted = RelayMetrics(provider.get_meter("test"), lambda: 3)
    endings = ("relay.finished", {"took_s": 1.5}), ("copy.finished", {"took_s": 9.0})
    for event, fields in (("relay.started", {}), *endings):
        counted.note(SchedulerEvent(1.0, "kind", "acme/tiny", "store-a", "because", event, fields))
    found: dict[str, list[Any]] = {}
    data = reader.get_metrics_data()
    assert data is not None
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        found[metric.name] = list(metric.data.data_points)
    events = {point.attributes["event"]: point.value for point in found["torchrelay_scheduler_relay_events"]}
    assert events == {"started": 1, "finished": 1}
    (took,) = found["torchrelay_scheduler_relay_duration"]
    assert took.sum == 1.5 and took.attributes == {"event": "finished"}
    assert [point.value for point in found["torchrelay_scheduler_relays_running"]] == [3]
    provider.shutdown()
