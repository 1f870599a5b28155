"""Engine time by activity, as an observable counter."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from cachetools import FIFOCache
from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from torchrelay.engine.core import StepProfile
from torchrelay.worker.metrics.time_shares import seconds_of

_MAX_SERIES = 512
Labels = tuple[str, str, str]  # model, roles, phase


class StepTimeCounter:
    """Seconds by model, roles and phase.

    There is no series per instance: each load makes a new instance, and most series would never grow. The sums are
    plain, because updating five counters of the SDK takes nearly as long as one step of a small model.
    """

    def __init__(self) -> None:
        self._sums: FIFOCache[Labels, list[float]] = FIFOCache(_MAX_SERIES)
        self._lock = threading.Lock()  # series are added on the event loop and collected on another thread
        metrics.get_meter("torchrelay.worker").create_observable_counter(
            "torchrelay_worker_engine_time", [self._observe], unit="s", description="Engine time, by activity."
        )

    def add(self, labels: Labels, profile: StepProfile) -> None:
        sums = self._sums.get(labels)
        if sums is None:
            with self._lock:
                sums = self._sums[labels] = [0.0] * 5
        for index, seconds in enumerate(seconds_of(profile).values()):
            sums[index] += seconds

    def _observe(self, _: CallbackOptions) -> Iterable[Observation]:
        with self._lock:
            series = list(self._sums.items())
        for (model, roles, phase), sums in series:
            labels = {"model": model, "roles": roles, "phase": phase}
            for activity, seconds in seconds_of(StepProfile(*sums)).items():
                yield Observation(seconds, {**labels, "activity": activity})
