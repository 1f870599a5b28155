"""OpenTelemetry instruments: of admissions, of transfers, whoever ordered them, and of the replicator's copies.

Functions given to them are called when metrics are collected.
"""

from __future__ import annotations

from collections import Counter as NumByKind
from collections.abc import Callable

from opentelemetry.metrics import Counter, Histogram, Meter, Observation

from torchrelay.common.process.telemetry import seconds_histogram
from torchrelay.scheduler.policy.core import CopyCause, Placement
from torchrelay.scheduler.policy.effects import SchedulerEvent
from torchrelay.scheduler.policy.prediction import Outcome
from torchrelay.scheduler.policy.relay.transfer_events import EVENT_PREFIX

_CAUSES = frozenset(cause.value for cause in CopyCause)


class _Instruments:
    """Makes instruments; ``torchrelay_scheduler_`` comes before every name."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def seconds(self, name: str, description: str) -> Histogram:
        return seconds_histogram(self._meter, f"torchrelay_scheduler_{name}", description)

    def counter(self, name: str, description: str) -> Counter:
        return self._meter.create_counter(f"torchrelay_scheduler_{name}", description=description)

    def observe(self, name: str, description: str, read: Callable[[], int], rises: bool = False) -> None:
        create = self._meter.create_observable_counter if rises else self._meter.create_observable_gauge
        create(f"torchrelay_scheduler_{name}", [lambda _: [Observation(read())]], description=description)

    def observe_kinds(self, name: str, description: str, counts: NumByKind[str]) -> None:
        """Counts that rise, by kind: read when they are wanted, since counting each time costs far more."""
        create = self._meter.create_observable_counter
        read = [lambda _: [Observation(number, {"kind": kind}) for kind, number in counts.items()]]
        create(f"torchrelay_scheduler_{name}", read, description=description)


class AdmissionMetrics:
    """``waiting``: requests; ``dropped``: events of the history."""

    def __init__(self, meter: Meter, waiting: Callable[[], int], dropped: Callable[[], int]) -> None:
        new = _Instruments(meter)
        self._wait = new.seconds("queue_wait", "From admission to placement.")
        self._ttft_error = new.seconds("ttft_prediction_error", "How far the predicted time to first token was off.")
        off = "How far the predicted mean time between tokens was off."
        self._tbt_error = new.seconds("tbt_prediction_error", off)
        self._num_answers: NumByKind[str] = NumByKind()
        new.observe_kinds("admissions", "Answers to admissions, by kind.", self._num_answers)
        new.observe("requests_waiting", "Requests waiting for a placement.", waiting)
        new.observe("events_dropped", "History events dropped.", dropped, rises=True)

    def placed(self, wait_s: float, cold: bool) -> None:
        self._wait.record(wait_s, {"cold": cold})

    def answered(self, kind: str) -> None:
        self._num_answers[kind] += 1

    def record_accuracy(self, placement: Placement, outcome: Outcome) -> None:
        """Prediction errors of an attempt; ``cold``: it was placed on an instance that was still loading."""
        cold = {"cold": placement.cold}
        if outcome.ttft_s is not None and placement.predicted.ttft_s:
            self._ttft_error.record(abs(outcome.ttft_s - placement.predicted.ttft_s), cold)
        if outcome.tbt_s is not None and placement.predicted.tbt_s:
            self._tbt_error.record(abs(outcome.tbt_s - placement.predicted.tbt_s), cold)


class RelayMetrics:
    """Of transfers."""

    def __init__(self, meter: Meter, num_running: Callable[[], int]) -> None:
        new = _Instruments(meter)
        self._events = new.counter("relay_events", "Relays started, repaired, slow, finished and failed, by event.")
        self._duration = new.seconds("relay_duration", "From the first chunk requested to the end, by event.")
        new.observe("relays_running", "Relays planned or running.", num_running)

    def note(self, event: SchedulerEvent) -> None:
        """Counts a transfer's event; ignores others."""
        if not event.topic.startswith(EVENT_PREFIX):
            return
        labels = {"event": event.topic.removeprefix(EVENT_PREFIX)}
        self._events.add(1, labels)
        if "took_s" in event.fields:
            self._duration.record(float(event.fields["took_s"]), labels)


class ReplicationMetrics:
    """``num_short``: recent packs that lack copies; ``num_running``: copies."""

    def __init__(self, meter: Meter, num_short: Callable[[], int], num_running: Callable[[], int]) -> None:
        new = _Instruments(meter)
        self._begun = new.counter("copies_started", "Copies ordered, by cause.")
        self._took = new.seconds("copy_duration", "From the order of a copy to its end.")
        new.observe("packs_under_replicated", "Recently used packs that lack copies in RAM.", num_short)
        new.observe("copies_running", "Copies ordered and not complete.", num_running)

    def note(self, event: SchedulerEvent) -> None:
        """Counts a copy's event; ignores others."""
        if event.kind in _CAUSES:
            self._begun.add(1, {"cause": event.kind})
        elif event.kind in ("copied", "copy_failed"):
            self._took.record(float(event.fields["took_s"]), {"failed": event.kind == "copy_failed"})
