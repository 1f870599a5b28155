"""What the worker has done since its start, and how fast: counters of the report, exported as metrics too."""

from __future__ import annotations

from collections import deque
from statistics import median

from opentelemetry import metrics

from torchrelay.engine.core import StepResult

_WINDOW = 64


class Meters:
    """Counters since the process started, and medians over the last steps."""

    def __init__(self) -> None:
        self.num_positions_prefilled = 0
        self.num_positions_decoded = 0
        self.kv_bytes_received = 0
        self.slot_start_s = 0.0
        self._decode_steps_s: deque[float] = deque(maxlen=_WINDOW)
        self._prefill_rates: deque[float] = deque(maxlen=_WINDOW)
        meter = metrics.get_meter("torchrelay.worker")
        self._step_s = meter.create_histogram(
            "torchrelay.worker.step", unit="s", description="Duration of an engine step."
        )
        self._positions = meter.create_counter(
            "torchrelay.worker.positions", unit="{position}", description="Positions run through the model, by phase."
        )

    def note(self, result: StepResult) -> None:
        """Counts one engine step."""
        self.num_positions_prefilled += result.num_positions_prefilled
        self.num_positions_decoded += result.num_positions_decoded
        if result.step_s <= 0:
            return
        self._step_s.record(result.step_s)
        if result.num_positions_prefilled:
            self._prefill_rates.append(result.num_positions_prefilled / result.step_s)
            self._positions.add(result.num_positions_prefilled, {"phase": "prefill"})
        elif result.num_positions_decoded:
            self._decode_steps_s.append(result.step_s)
        if result.num_positions_decoded:
            self._positions.add(result.num_positions_decoded, {"phase": "decode"})

    @property
    def step_s(self) -> float:
        """Median of the last pure decode steps; 0 before the first."""
        return median(self._decode_steps_s) if self._decode_steps_s else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Median rate of the last steps with prefill; 0 before the first."""
        return median(self._prefill_rates) if self._prefill_rates else 0.0
