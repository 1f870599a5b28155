"""Counters and rates of engine steps, for the worker's report and its exported metrics."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from torchrelay.common.latency.latency_model import NO_WORK, LatencyModel
from torchrelay.common.process.telemetry import observe_counts, seconds_histogram
from torchrelay.engine.core import StepResult
from torchrelay.worker.metrics.latency_fits import LatencyFits
from torchrelay.worker.metrics.step_floor import StepFloor
from torchrelay.worker.metrics.step_time import StepTimeCounter
from torchrelay.worker.metrics.time_shares import NO_SHARES, TimeShares

_MEDIAN_WINDOW_STEPS = 64


@dataclass(frozen=True, slots=True)
class InstanceLabels:
    """The labels of the instance in the slot in metrics."""

    instance_id: str
    model: str
    pack_id: str
    roles: str  # "prefill", "decode" or "prefill+decode"


class StepMetrics:
    """Counters since the process started, medians over recent steps, and the latency model fitted to them."""

    def __init__(self, token_budget: int = 512) -> None:
        self.num_positions_prefilled = 0
        self.num_positions_decoded = 0
        self.kv_bytes_received = 0
        self.slot_start_s = 0.0
        self._time_shares = NO_SHARES  # of the instance that made the last step
        self._instance_labels: InstanceLabels | None = None
        self._latency_fits = LatencyFits(token_budget)
        self._decode_steps_s: deque[float] = deque(maxlen=_MEDIAN_WINDOW_STEPS)
        self._prefill_rates: deque[float] = deque(maxlen=_MEDIAN_WINDOW_STEPS)
        meter = metrics.get_meter("torchrelay.worker")
        self._step_s = seconds_histogram(meter, "torchrelay_worker_step_duration", "Duration of an engine step.")
        meter.create_observable_counter(
            "torchrelay_worker_positions",
            [self._observe_positions],
            unit="{position}",
            description="Positions run through the model, by phase.",
        )
        self._num_recomputed: Counter[str] = Counter()  # positions, by model
        recomputed = "Positions of preempted requests that were computed again."
        observe_counts(meter, "torchrelay_worker_recomputed_positions", recomputed, "model", self._num_recomputed)
        self._step_time = StepTimeCounter()
        meter.create_observable_gauge(
            "torchrelay_worker_latency_prediction_error",
            [self._observe_errors],
            unit="1",
            description="Mean |measured - predicted| / predicted of recent steps, by phase.",
        )

    def record_step(
        self, result: StepResult, instance_labels: InstanceLabels | None = None, floor: StepFloor | None = None
    ) -> None:
        """Counts an engine step of the instance that ``instance_labels`` names. ``floor``: that of its model."""
        self.num_positions_prefilled += result.num_positions_prefilled
        self.num_positions_decoded += result.num_positions_decoded
        if result.step_s <= 0:
            return
        self._step_s.record(result.step_s)
        is_whole = result.work != NO_WORK  # else a rate could not be told from its time
        if is_whole and result.num_positions_prefilled:
            self._prefill_rates.append(result.num_positions_prefilled / result.step_s)
        elif is_whole and result.num_positions_decoded:
            self._decode_steps_s.append(result.step_s)
        if instance_labels is not None:
            self._record_profile(result, instance_labels, floor)

    def _record_profile(self, result: StepResult, instance_labels: InstanceLabels, floor: StepFloor | None) -> None:
        if self._instance_labels is None or self._instance_labels.instance_id != instance_labels.instance_id:
            self._time_shares = NO_SHARES
        self._instance_labels = instance_labels
        if result.num_positions_recomputed:
            self._num_recomputed[instance_labels.model] += result.num_positions_recomputed
        profile = result.profile
        if floor is not None and floor.is_bound_by_memory(result.work, result.step_s):
            profile = replace(profile, compute_s=0.0, memory_s=profile.compute_s + profile.memory_s)
        self._time_shares = self._time_shares.after(profile)
        self._latency_fits.record_step(instance_labels.pack_id, result)
        self._step_time.add((instance_labels.model, instance_labels.roles, _phase_of(result)), profile)

    def time_shares_of(self, instance_labels: InstanceLabels | None) -> TimeShares:
        """Shares of the recent engine time of an instance; ``NO_SHARES`` unless it made the last step."""
        last = self._instance_labels
        if instance_labels is None or last is None or last.instance_id != instance_labels.instance_id:
            return NO_SHARES
        return self._time_shares

    def latency(self, instance_labels: InstanceLabels | None) -> LatencyModel | None:
        """The latency model of the instance's pack on this worker; None before its first sample."""
        return self._latency_fits.model(instance_labels.pack_id) if instance_labels is not None else None

    @property
    def step_s(self) -> float:
        """Median of recent pure decode steps; 0 before the first."""
        return median(self._decode_steps_s) if self._decode_steps_s else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Median rate of recent steps with prefill; 0 before the first."""
        return median(self._prefill_rates) if self._prefill_rates else 0.0

    def _observe_positions(self, _: CallbackOptions) -> Iterable[Observation]:
        yield Observation(self.num_positions_prefilled, {"phase": "prefill"})
        yield Observation(self.num_positions_decoded, {"phase": "decode"})

    def _observe_errors(self, _: CallbackOptions) -> Iterable[Observation]:
        model = self.latency(self._instance_labels)
        if self._instance_labels is None or model is None:
            return
        for phase, cost in (("prefill", model.prefill), ("decode", model.decode)):
            if cost.known:
                yield Observation(cost.error, {"model": self._instance_labels.model, "phase": phase})


def _phase_of(result: StepResult) -> str:
    if not (result.num_positions_prefilled or result.ran_one_layer):
        return "decode"
    return "mixed" if result.num_positions_decoded else "prefill"
