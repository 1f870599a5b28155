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
class _Measured:
    """Recent mean and variance of logarithms."""

    at: float  # of the last measurement; the means fade since
    mean: float = 0.0
    variance: float = _USUAL_VARIANCE
    shrunk: float = 0.0
    factor: float = 1.0  # as last computed
    factor_until: float = -math.inf  # when ``factor`` is to be recomputed


class Corrections:
    """Corrections by instance. ``weight``: weight of the newest measurement."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._chance = weight / (2 - weight)  # variance of the mean / variance of one measurement
        self._by_instance: dict[str, _Measured] = {}

    def of(self, instance_id: str, now: float) -> float:
        """Factor for the instance's predicted times; 1 without a correction."""
        measured = self._by_instance.get(instance_id)
        if measured is None or not measured.shrunk:
            return 1.0
        if now >= measured.factor_until:
            measured.factor = float(2.0 ** (measured.shrunk * _remaining(measured, now)))
            measured.factor_until = now + FADE_EVERY_S
        return measured.factor

    def observe(self, instance_id: str, predicted_s: float, correction: float, measured_s: float, now: float) -> None:
        """Learns from a measured time. ``correction``: the factor that is part of ``predicted_s``, which may differ
        from the present one: many times are predicted before the first of them is measured, and with the present factor
        each of these would be corrected again for the same deviation.
        """
        if predicted_s <= 0 or measured_s <= 0:
            return
        measured = self._by_instance.setdefault(instance_id, _Measured(now))
        ratio = min(max(math.log2(measured_s / predicted_s), -_MAX_LOG), _MAX_LOG)
        mean = measured.mean * _remaining(measured, now)
        deviation = ratio + math.log2(correction) - mean
        mean = min(max(mean + self._weight * deviation, -_MAX_LOG - _MOST), _MAX_LOG + _MOST)
        measured.variance += self._weight * (deviation * deviation - measured.variance)
        share = 1 - self._chance * measured.variance / (mean * mean) if mean else 0.0
        measured.factor_until = now
        measured.at, measured.mean = now, mean
        measured.shrunk = min(max(mean * max(share, 0.0), _LEAST), _MOST)

    def forget(self, instance_id: str) -> None:
        """Forgets an instance that is gone."""
        self._by_instance.pop(instance_id, None)


def _remaining(measured: _Measured, now: float) -> float:
    """Share of the mean that has not faded."""
    return float(0.5 ** ((now - measured.at) / HALF_LIFE_S))
