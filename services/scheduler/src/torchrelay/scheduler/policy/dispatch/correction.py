"""What predicted times are multiplied by, for each instance, because of what was measured there."""

from __future__ import annotations

from typing import Final

TTFT_WEIGHT: Final = 0.15  # of the newest measurement
TBT_WEIGHT: Final = 0.05  # less: how many prompts and answers come during one answer is chance
HALF_LIFE_S: Final = (
    120.0  # of the logarithm: an instance that is left because it was slow is not measured: it is tried again
)
_MAX_RATIO = 8.0  # of one measurement, either way
_BOUNDS = (0.5, 8.0)


class Corrections:
    """Geometric means of measured over predicted times, of late. ``weight``: of the newest."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._measured: dict[str, tuple[float, float]] = {}  # the factor, and when it was measured

    def of(self, instance_id: str, now: float) -> float:
        found = self._measured.get(instance_id)
        return float(found[0] ** 0.5 ** ((now - found[1]) / HALF_LIFE_S)) if found else 1.0

    def observe(self, instance_id: str, predicted_s: float, measured_s: float, now: float) -> None:
        """``predicted_s``: with the correction of its time."""
        if predicted_s <= 0 or measured_s <= 0:
            return
        ratio = min(max(measured_s / predicted_s, 1 / _MAX_RATIO), _MAX_RATIO)
        factor = self.of(instance_id, now) * ratio**self._weight
        self._measured[instance_id] = min(max(factor, _BOUNDS[0]), _BOUNDS[1]), now

    def forget(self, instance_id: str) -> None:
        """The instance is gone."""
        self._measured.pop(instance_id, None)
