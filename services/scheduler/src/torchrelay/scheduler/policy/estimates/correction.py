"""Correction factor for the predicted times of each instance, learned from the times measured there.

It is based on the recent mean and variance of log2(measured / uncorrected prediction). The mean is shrunk by what
chance explains (James and Stein, *Estimation with Quadratic Loss*, 1961):

    shrunk = mean * max(1 - variance of the mean / mean^2, 0)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

TTFT_WEIGHT: Final = 0.15  # of the newest measurement
TBT_WEIGHT: Final = 0.05  # less, because the number of prompts and answers during one answer is random
# Half-life of the mean: an instance that is avoided because it was slow is not measured, and must be tried again.
HALF_LIFE_S: Final = 120.0
# Logarithms to base 2.
_MAX_LOG = 3.0  # limit of the absolute value of one measurement
_LEAST, _MOST = -1.0, 3.0  # limits of the shrunk mean
_USUAL_VARIANCE = 0.08  # before any measurement: about 20% more or less
FADE_EVERY_S: Final = 0.25  # values that fade are recomputed this often: they are read with each request


@dataclass(slots=True)
class Correction:
    """The correction of an instance's predicted times. ``weight``: weight of the newest measurement."""

    weight: float
    _at: float = 0.0  # of the last measurement; the mean fades since
    _mean: float = 0.0  # of logarithms
    _variance: float = _USUAL_VARIANCE
    _shrunk: float = 0.0
    _factor: float = 1.0  # as last computed
    _factor_until: float = -math.inf  # when the factor is to be recomputed

    def factor(self, now: float) -> float:
        """Factor for the instance's predicted times; 1 without a correction."""
        if self._shrunk and now >= self._factor_until:
            self._factor = float(2.0 ** (self._shrunk * self._remaining(now)))
            self._factor_until = now + FADE_EVERY_S
        return self._factor

    def observe(self, predicted_s: float, factor: float, measured_s: float, now: float) -> None:
        """Learns from a measured time. ``factor``: part of ``predicted_s``, which may differ from the present one: many
        times are predicted before the first of them is measured, and with the present factor each of these would be
        corrected again for the same deviation.
        """
        if predicted_s <= 0 or measured_s <= 0:
            return
        ratio = min(max(math.log2(measured_s / predicted_s), -_MAX_LOG), _MAX_LOG)
        mean = self._mean * self._remaining(now)
        deviation = ratio + math.log2(factor) - mean
        mean = min(max(mean + self.weight * deviation, -_MAX_LOG - _MOST), _MAX_LOG + _MOST)
        self._variance += self.weight * (deviation * deviation - self._variance)
        # By chance, the variance of the mean is this part of that of a measurement.
        chance = self.weight / (2 - self.weight)
        share = 1 - chance * self._variance / (mean * mean) if mean else 0.0
        self._at, self._mean, self._factor, self._factor_until = now, mean, 1.0, now
        self._shrunk = min(max(mean * max(share, 0.0), _LEAST), _MOST)

    def _remaining(self, now: float) -> float:
        """Share of the mean that has not faded."""
        return float(0.5 ** ((now - self._at) / HALF_LIFE_S))
