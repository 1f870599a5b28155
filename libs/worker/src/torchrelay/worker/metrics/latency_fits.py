"""Latency models of engine steps, for each pack that this worker has computed with."""

from __future__ import annotations

from cachetools import FIFOCache

from torchrelay.common.latency.latency_model import NO_WORK, LatencyFit, LatencyModel
from torchrelay.engine.core import StepResult

_MAX_PACKS = 64
_SAMPLE_INTERVAL_S = 0.01  # time in steps per sample: fitting costs as much as a small model's step


class LatencyFits:
    """Fits by pack. They outlive the instance: a model that is loaded again is predicted from its first step on."""

    def __init__(self, token_budget: int) -> None:
        self._token_budget = token_budget
        # Each sample puts its fit last. An LRUCache would not do: reads change its order, and metrics read on a thread.
        self._fits: FIFOCache[str, LatencyFit] = FIFOCache(_MAX_PACKS)
        # Time in steps since the last sample: with prefill, and without.
        self._unsampled_s = {True: _SAMPLE_INTERVAL_S, False: _SAMPLE_INTERVAL_S}

    def record_step(self, pack_id: str, result: StepResult) -> None:
        """Learns from one step, unless it is no step of whole batches: such a step predicts nothing."""
        if result.work == NO_WORK or result.step_s <= 0:
            return
        has_prefill = result.work.num_prefilled > 0
        # Decided by the earlier steps: the step that fills the interval is usually a long one.
        is_sample = self._unsampled_s[has_prefill] >= _SAMPLE_INTERVAL_S
        self._unsampled_s[has_prefill] = result.step_s + (0.0 if is_sample else self._unsampled_s[has_prefill])
        if not is_sample:
            return
        fit = self._fits[pack_id] = self._fits.get(pack_id) or LatencyFit(self._token_budget)
        fit.observe(result.work, result.step_s)

    def model(self, pack_id: str) -> LatencyModel | None:
        """The latency model of a pack; None before its first sample."""
        fit = self._fits.get(pack_id)
        return fit.model if fit else None
