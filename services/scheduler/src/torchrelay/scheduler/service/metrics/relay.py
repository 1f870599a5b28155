"""Metrics of transfers, whoever ordered them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from torchrelay.common.process.telemetry import seconds_histogram
from torchrelay.scheduler.policy.effects import SchedulerEvent
from torchrelay.scheduler.policy.relay.transfer_events import EVENT_PREFIX


class RelayMetrics:
    """``num_running`` is called when metrics are collected."""

    def __init__(self, meter: Meter, num_running: Callable[[], int]) -> None:
        self._events = meter.create_counter(
            "torchrelay_scheduler_relay_events",
            description="Relays started, repaired, slow, finished and failed, by event.",
        )
        self._duration = seconds_histogram(
            meter, "torchrelay_scheduler_relay_duration", "From the first chunk requested to the end, by event."
        )

        def running(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(num_running())]

        meter.create_observable_gauge(
            "torchrelay_scheduler_relays_running", [running], description="Relays planned or running."
        )

    def note(self, event: SchedulerEvent) -> None:
        """Counts a transfer's event; ignores others."""
        if not event.topic.startswith(EVENT_PREFIX):
            return
        labels = {"event": event.topic.removeprefix(EVENT_PREFIX)}
        self._events.add(1, labels)
        if "took_s" in event.fields:
            self._duration.record(float(event.fields["took_s"]), labels)
