"""Metrics of admissions: waits, answers, prediction errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from torchrelay.common.process.telemetry import seconds_histogram
from torchrelay.scheduler.policy.core import Placement
from torchrelay.scheduler.policy.prediction import Outcome


class AdmissionMetrics:
    """Instruments; ``waiting`` and ``dropped`` are read when metrics are collected."""

    def __init__(self, meter: Meter, waiting: Callable[[], int], dropped: Callable[[], int]) -> None:
        self._wait = seconds_histogram(meter, "torchrelay_scheduler_queue_wait", "From admission to placement.")
        self._ttft_error = seconds_histogram(
            meter, "torchrelay_scheduler_ttft_prediction_error", "How far the predicted time to first token was off."
        )
        self._tbt_error = seconds_histogram(
            meter,
            "torchrelay_scheduler_tbt_prediction_error",
            "How far the predicted mean time between tokens was off.",
        )
        self._answers = meter.create_counter(
            "torchrelay_scheduler_admissions", description="Answers to admissions, by kind."
        )
        meter.create_observable_gauge(
            "torchrelay_scheduler_requests_waiting",
            [_observed(waiting)],
            description="Requests waiting for a placement.",
        )
        meter.create_observable_counter(
            "torchrelay_scheduler_events_dropped", [_observed(dropped)], description="History events dropped."
        )

    def placed(self, wait_s: float, cold: bool) -> None:
        self._wait.record(wait_s, {"cold": cold})

    def answered(self, kind: str) -> None:
        self._answers.add(1, {"kind": kind})

    def record_accuracy(self, placement: Placement, outcome: Outcome) -> None:
        """Prediction errors of an attempt; ``cold``: it was placed on an instance that was still loading."""
        cold = {"cold": placement.cold}
        if outcome.ttft_s is not None and placement.predicted.ttft_s:
            self._ttft_error.record(abs(outcome.ttft_s - placement.predicted.ttft_s), cold)
        if outcome.tbt_s is not None and placement.predicted.tbt_s:
            self._tbt_error.record(abs(outcome.tbt_s - placement.predicted.tbt_s), cold)


def _observed(read: Callable[[], int]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(read())]

    return observe
