"""Factor for the predicted times of each instance, learned from the times measured there.

The logarithm of measured over predicted times, uncorrected, has a mean and a variance of late. As far as such a mean
would come about by chance it is not believed (James and Stein, *Estimation with Quadratic Loss*, 1961):

    believed = mean * (1 - variance of the mean / mean^2), or nothing if that is negative
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

TTFT_WEIGHT: Final = 0.15  # of the newest measurement
TBT_WEIGHT: Final = 0.05  # less: how many prompts and answers come during one answer is chance
# Of the logarithm: an instance that is left because it was slow is not measured, and is tried again.
HALF_LIFE_S: Final = 120.0
# Logarithms to base 2.
_MAX_LOG = 3.0  # of one measurement, either way
_LEAST, _MOST = -1.0, 3.0  # that are believed
_USUAL_VARIANCE = 0.08  # before any was measured: a fifth more or less
FADE_EVERY_S: Final = 0.25  # what fades with time is computed anew so often: it is asked for with each request


@dataclass(slots=True)
class _Measured:
    """Recent mean and variance of logarithms."""

    at: float  # of the last measurement; the means fade since
    mean: float = 0.0
    variance: float = _USUAL_VARIANCE
    believed: float = 0.0
    factor: float = 1.0  # as it was when last computed,
    factor_until: float = -math.inf  # and as it counts until then


class Corrections:
    """``weight``: of the newest measurement."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._chance = weight / (2 - weight)  # variance of the mean, in those of one measurement
        self._measured: dict[str, _Measured] = {}

    def of(self, instance_id: str, now: float) -> float:
        """Factor for the instance's predicted times; 1 without a correction."""
        found = self._measured.get(instance_id)
        if found is None or not found.believed:
            return 1.0
        if now >= found.factor_until:
            found.factor = float(2.0 ** (found.believed * _left(found, now)))
            found.factor_until = now + FADE_EVERY_S
        return found.factor

    def observe(self, instance_id: str, predicted_s: float, correction: float, measured_s: float, now: float) -> None:
        """``correction``: the factor that is part of ``predicted_s``. Many are predicted before the first of them is
        measured: with the factor of now, each of them would add to it what all have in common.
        """
        if predicted_s <= 0 or measured_s <= 0:
            return
        found = self._measured.setdefault(instance_id, _Measured(now))
        ratio = min(max(math.log2(measured_s / predicted_s), -_MAX_LOG), _MAX_LOG)
        mean = found.mean * _left(found, now)
        off = ratio + math.log2(correction) - mean
        mean = min(max(mean + self._weight * off, -_MAX_LOG - _MOST), _MAX_LOG + _MOST)
        found.variance += self._weight * (off * off - found.variance)
        part = 1 - self._chance * found.variance / (mean * mean) if mean else 0.0
        found.factor_until = now
        found.at, found.mean, found.believed = now, mean, min(max(mean * max(part, 0.0), _LEAST), _MOST)

    def forget(self, instance_id: str) -> None:
        """The instance is gone."""
        self._measured.pop(instance_id, None)


def _left(found: _Measured, now: float) -> float:
    return float(0.5 ** ((now - found.at) / HALF_LIFE_S))
