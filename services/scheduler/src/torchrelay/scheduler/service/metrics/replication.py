"""Metrics of the replicator."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from torchrelay.common.process.telemetry import seconds_histogram
from torchrelay.scheduler.policy.core import CopyCause
from torchrelay.scheduler.policy.effects import SchedulerEvent

_CAUSES = frozenset(cause.value for cause in CopyCause)


class ReplicationMetrics:
    """``num_short`` and ``num_running`` are called when metrics are collected."""

    def __init__(self, meter: Meter, num_short: Callable[[], int], num_running: Callable[[], int]) -> None:
        self._begun = meter.create_counter(
            "torchrelay_scheduler_copies_started", description="Copies ordered, by cause."
        )
        self._took = seconds_histogram(
            meter, "torchrelay_scheduler_copy_duration", "From the order of a copy to its end."
        )

        def short(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(num_short())]

        def running(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(num_running())]

        meter.create_observable_gauge(
            "torchrelay_scheduler_packs_under_replicated",
            [short],
            description="Recently used packs that lack copies in RAM.",
        )
        meter.create_observable_gauge(
            "torchrelay_scheduler_copies_running", [running], description="Copies ordered and not complete."
        )

    def note(self, event: SchedulerEvent) -> None:
        """Counts a copy's event; ignores others."""
        if event.kind in _CAUSES:
            self._begun.add(1, {"cause": event.kind})
        elif event.kind in ("copied", "copy_failed"):
            self._took.record(float(event.fields["took_s"]), {"failed": event.kind == "copy_failed"})
