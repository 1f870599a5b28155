"""What predicted times to the first token are multiplied by, for each instance, because of what was measured there."""

from __future__ import annotations

_WEIGHT = 0.15  # of the newest measurement
_MAX_RATIO = 8.0  # of one measurement, either way
_BOUNDS = (0.5, 8.0)
_HALF_LIFE_S = (
    120.0  # of the logarithm: an instance that is left because it was slow is not measured: it is tried again
)


class Corrections:
    """Geometric means of measured over predicted times, of late."""

    def __init__(self) -> None:
        self._measured: dict[str, tuple[float, float]] = {}  # the factor, and when it was measured

    def of(self, instance_id: str, now: float) -> float:
        measured = self._measured.get(instance_id)
        if measured is None:
            return 1.0
        factor, at = measured
        return float(factor**0.5 ** ((now - at) / _HALF_LIFE_S))

    def observe(self, instance_id: str, predicted_s: float, measured_s: float, now: float) -> None:
        """``predicted_s``: with the correction of its time."""
        if predicted_s <= 0 or measured_s <= 0:
            return
        ratio = min(max(measured_s / predicted_s, 1 / _MAX_RATIO), _MAX_RATIO)
        factor = self.of(instance_id, now) * ratio**_WEIGHT
        self._measured[instance_id] = min(max(factor, _BOUNDS[0]), _BOUNDS[1]), now

    def forget(self, instance_id: str) -> None:
        """The instance is gone."""
        self._measured.pop(instance_id, None)
