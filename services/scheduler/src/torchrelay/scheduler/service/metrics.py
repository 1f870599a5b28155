"""The scheduler's metrics: admissions, transfers, and the replicator's copies.

Functions given to them are called when metrics are collected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from opentelemetry.metrics import Meter

from torchrelay.common.process.telemetry import observe_counts, observe_value, seconds_histogram
from torchrelay.scheduler.policy.effects import SchedulerEvent
from torchrelay.scheduler.policy.prediction import Outcome
from torchrelay.scheduler.policy.relay.transfer_events import EVENT_PREFIX
from torchrelay.scheduler.policy.types import CopyCause, Placement

_CAUSES = frozenset(cause.value for cause in CopyCause)


class AdmissionMetrics:
    """``num_waiting``: requests; ``num_dropped``: events of the history."""

    def __init__(self, meter: Meter, num_waiting: Callable[[], int], num_dropped: Callable[[], int]) -> None:
        self._wait = seconds_histogram(meter, "torchrelay_scheduler_queue_wait", "From admission to placement.")
        ttft, tbt = "torchrelay_scheduler_ttft_prediction_error", "torchrelay_scheduler_tbt_prediction_error"
        self._ttft_error = seconds_histogram(meter, ttft, "How far the predicted time to first token was off.")
        self._tbt_error = seconds_histogram(meter, tbt, "How far the predicted mean time between tokens was off.")
        self._num_answers: Counter[str] = Counter()  # by kind
        answers = "Answers to admissions, by kind."
        observe_counts(meter, "torchrelay_scheduler_admissions", answers, "kind", self._num_answers)
        waiting, dropped = "Requests waiting for a placement.", "History events dropped."
        observe_value(meter, "torchrelay_scheduler_requests_waiting", waiting, num_waiting)
        observe_value(meter, "torchrelay_scheduler_events_dropped", dropped, num_dropped, rises=True)

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
    """Transfers, whoever ordered them. ``num_running``: planned or running."""

    def __init__(self, meter: Meter, num_running: Callable[[], int]) -> None:
        self._num_events: Counter[str] = Counter()  # by event
        events = "Relays started, repaired, slow, finished and failed, by event."
        observe_counts(meter, "torchrelay_scheduler_relay_events", events, "event", self._num_events)
        duration = "From the first chunk requested to the end, by event."
        self._duration = seconds_histogram(meter, "torchrelay_scheduler_relay_duration", duration)
        observe_value(meter, "torchrelay_scheduler_relays_running", "Relays planned or running.", num_running)

    def note(self, event: SchedulerEvent) -> None:
        """Counts a transfer's event; ignores others."""
        if not event.topic.startswith(EVENT_PREFIX):
            return
        name = event.topic.removeprefix(EVENT_PREFIX)
        self._num_events[name] += 1
        if "took_s" in event.fields:
            self._duration.record(float(event.fields["took_s"]), {"event": name})


class ReplicationMetrics:
    """The replicator's copies. ``num_short``: recently used packs that lack copies; ``num_running``: copies."""

    def __init__(self, meter: Meter, num_short: Callable[[], int], num_running: Callable[[], int]) -> None:
        self._num_started: Counter[str] = Counter()  # by cause
        started = "Copies ordered, by cause."
        observe_counts(meter, "torchrelay_scheduler_copies_started", started, "cause", self._num_started)
        duration = "From the order of a copy to its end."
        self._duration = seconds_histogram(meter, "torchrelay_scheduler_copy_duration", duration)
        short, running = "Recently used packs that lack copies in RAM.", "Copies ordered and not complete."
        observe_value(meter, "torchrelay_scheduler_packs_under_replicated", short, num_short)
        observe_value(meter, "torchrelay_scheduler_copies_running", running, num_running)

    def note(self, event: SchedulerEvent) -> None:
        """Counts a copy's event; ignores others."""
        if event.kind in _CAUSES:
            self._num_started[event.kind] += 1
        elif event.kind in ("copied", "copy_failed"):
            self._duration.record(float(event.fields["took_s"]), {"failed": event.kind == "copy_failed"})
