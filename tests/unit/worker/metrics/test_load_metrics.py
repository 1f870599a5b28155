"""The load's gauges have the model of the slot, and no series while it is free."""

from __future__ import annotations

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from torchrelay.worker.metrics.load_metrics import export_load
from torchrelay.worker.metrics.step_metrics import InstanceLabels


def test_load_is_that_of_the_model_in_the_slot() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    slot: list[InstanceLabels] = []
    export_load(lambda: 3, lambda: 0.25, lambda: slot[0] if slot else None, provider.get_meter("test"))
    assert values(reader) == {}
    slot.append(InstanceLabels("i-1", "acme/tiny", "pack", "decode"))
    assert values(reader) == {
        ("torchrelay_worker_requests_running", "acme/tiny"): 3,
        ("torchrelay_worker_kv_cache_usage", "acme/tiny"): 0.25,
    }
    provider.shutdown()


def values(reader: InMemoryMetricReader) -> dict[tuple[str, object], float]:
    data = reader.get_metrics_data()
    metrics = data.resource_metrics[0].scope_metrics[0].metrics if data is not None else []
    return {
        (metric.name, (point.attributes or {})["model"]): getattr(point, "value", 0.0)
        for metric in metrics
        for point in metric.data.data_points
    }
