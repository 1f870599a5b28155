"""The load of the instance in the slot, as exported metrics."""

from __future__ import annotations

from collections.abc import Callable

from opentelemetry import metrics

from torchrelay.common.process.telemetry import observe_values
from torchrelay.worker.metrics.step_metrics import InstanceLabels


def export_load(
    num_running: Callable[[], int],
    kv_usage: Callable[[], float],
    bottleneck: Callable[[], str],
    instance_labels: Callable[[], InstanceLabels | None],
    meter: metrics.Meter | None = None,
) -> None:
    """Registers gauges of the instance's requests, its share of the KV pool and its bottleneck; none while the slot is
    free.
    """
    meter = meter or metrics.get_meter("torchrelay.worker")

    def of_instance(value: Callable[[], float]) -> Callable[[], dict[tuple[str, ...], float]]:
        def values() -> dict[tuple[str, ...], float]:
            labels = instance_labels()
            return {(labels.model,): value()} if labels is not None else {}

        return values

    def bottlenecks() -> dict[tuple[str, ...], float]:
        labels, name = instance_labels(), bottleneck()
        return {(labels.model, name): 1.0} if labels is not None and name else {}

    running, usage = "Attempts at requests in the slot.", "Share of the KV pool's pages in use."
    observe_values(meter, "torchrelay_worker_requests_running", running, ("model",), of_instance(num_running))
    observe_values(meter, "torchrelay_worker_kv_cache_usage", usage, ("model",), of_instance(kv_usage))
    holds_back = "1 for what holds the instance back: compute, memory, kv_transfer, io_wait, scheduling or loading."
    observe_values(meter, "torchrelay_worker_bottleneck", holds_back, ("model", "bottleneck"), bottlenecks)
