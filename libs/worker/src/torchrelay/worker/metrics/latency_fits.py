"""What this worker has learned of how long steps take: a latency model for each pack it has computed with."""

from __future__ import annotations

from collections import OrderedDict

from torchrelay.common.latency_model import LatencyFit, LatencyModel
from torchrelay.engine.core import StepResult

_MAX_PACKS = 64
_SAMPLE_INTERVAL_S = (
    0.01  # of steps of a kind, one is learned from: a small model's are no longer than the learning would seem
)


class LatencyFits:
    """Fits by pack, kept while the pack is not in the slot: a model that comes back is predicted at once."""

    def __init__(self, token_budget: int) -> None:
        self._token_budget = token_budget
        self._fits: OrderedDict[str, LatencyFit] = OrderedDict()
        self._unlearned_s = {
            True: _SAMPLE_INTERVAL_S,
            False: _SAMPLE_INTERVAL_S,
        }  # time in steps with prefill, and without

    def record_step(self, pack_id: str, result: StepResult) -> None:
        """One step. Those that waited for weights are left out: what they took says nothing of the next one."""
        if result.profile.io_wait_s > 0 or result.step_s <= 0:
            return
        kind = result.work.num_prefilled > 0
        self._unlearned_s[kind] += result.step_s
        if self._unlearned_s[kind] < _SAMPLE_INTERVAL_S:
            return
        self._unlearned_s[kind] = 0.0
        self._fit(pack_id).observe(result.work, result.step_s)

    def _fit(self, pack_id: str) -> LatencyFit:
        fit = self._fits.setdefault(pack_id, LatencyFit(self._token_budget))
        self._fits.move_to_end(pack_id)
        if len(self._fits) > _MAX_PACKS:
            self._fits.popitem(last=False)
        return fit

    def model(self, pack_id: str) -> LatencyModel | None:
        """None: not a step of it yet."""
        fit = self._fits.get(pack_id)
        return fit.model if fit else None
