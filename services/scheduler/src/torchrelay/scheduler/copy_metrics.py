"""The replicator's metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from torchrelay.common.telemetry import seconds_histogram
from torchrelay.scheduler.copybook import CopyBook
from torchrelay.scheduler.effects import Happening
from torchrelay.scheduler.replication import Cause

_CAUSES = frozenset(cause.value for cause in Cause)


class CopyMetrics:
    """``book`` is read when metrics are collected."""

    def __init__(self, book: Callable[[], CopyBook]) -> None:
        meter = metrics.get_meter("torchrelay.scheduler")
        self._begun = meter.create_counter("torchrelay_scheduler_copies", description="Copies ordered, by cause.")
        self._took = seconds_histogram(meter, "torchrelay_scheduler_copy", "From the order of a copy to its end.")

        def short(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(book().num_short)]

        def under_way(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(len(book().under_way))]

        meter.create_observable_gauge(
            "torchrelay_scheduler_packs_short", [short], description="Packs used of late that lack copies in RAM."
        )
        meter.create_observable_gauge(
            "torchrelay_scheduler_copies_under_way", [under_way], description="Copies ordered and not there yet."
        )

    def happened(self, happening: Happening) -> None:
        """Counts what concerns copies."""
        if happening.kind in _CAUSES:
            self._begun.add(1, {"cause": happening.kind})
        elif happening.kind in ("copied", "copy_failed"):
            self._took.record(float(happening.fields["took_s"]), {"failed": happening.kind == "copy_failed"})
