"""The time of the engine by what it was spent on, as a metric that is read when it is collected."""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from torchrelay.engine.core import StepProfile
from torchrelay.worker.metrics.time_shares import seconds_of

_MAX_SERIES = 512
Labels = tuple[str, str, str]  # model, roles, phase


class StepTimeCounter:
    """Sums by model, roles and phase.

    Not by instance: there is a new one with each load, and nobody would ever see most of the series grow. Kept as plain
    sums, since one step of a small model is hardly longer than five counters of the SDK take.
    """

    def __init__(self) -> None:
        self._sums: dict[Labels, list[float]] = {}
        metrics.get_meter("torchrelay.worker").create_observable_counter(
            "torchrelay_worker_engine_time",
            [self._observe],
            unit="s",
            description="Time of the engine, by what it was spent on.",
        )

    def add(self, labels: Labels, profile: StepProfile) -> None:
        sums = self._sums.get(labels)
        if sums is None:
            if len(self._sums) == _MAX_SERIES:
                del self._sums[next(iter(self._sums))]
            sums = self._sums[labels] = [0.0] * 5
        sums[0] += profile.compute_s
        sums[1] += profile.memory_s
        sums[2] += profile.kv_transfer_s
        sums[3] += profile.io_wait_s
        sums[4] += profile.scheduling_s

    def _observe(self, _: CallbackOptions) -> Iterable[Observation]:
        for (model, roles, phase), sums in list(self._sums.items()):
            labels = {"model": model, "roles": roles, "phase": phase}
            for share, seconds in seconds_of(StepProfile(*sums)).items():
                yield Observation(seconds, {**labels, "share": share})
