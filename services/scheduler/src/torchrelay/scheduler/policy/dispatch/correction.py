"""What predicted times to the first token are multiplied by, for each worker, because of what was measured there."""

from __future__ import annotations

from cachetools import FIFOCache

_MAX_WORKERS = 16384
_WEIGHT = 0.15  # of the newest measurement
_MAX_RATIO = 8.0  # of one measurement, either way
_BOUNDS = (0.5, 8.0)


class Corrections:
    """Geometric means of measured over predicted times, of late."""

    def __init__(self) -> None:
        self._factors: FIFOCache[str, float] = FIFOCache(_MAX_WORKERS)

    def of(self, worker_id: str) -> float:
        return self._factors.get(worker_id, 1.0)

    def observe(self, worker_id: str, predicted_s: float, measured_s: float) -> None:
        """``predicted_s``: with the correction of its time."""
        if predicted_s <= 0 or measured_s <= 0:
            return
        ratio = min(max(measured_s / predicted_s, 1 / _MAX_RATIO), _MAX_RATIO)
        factor = self.of(worker_id) * ratio**_WEIGHT
        self._factors[worker_id] = min(max(factor, _BOUNDS[0]), _BOUNDS[1])
