"""Receive rates: a decaying rate to display, and a monitor that detects a slow source. Pure; time is an argument."""

from __future__ import annotations

import math
from dataclasses import dataclass

DECAY_S = 0.5
BIN_S = 0.025  # shortest span to measure a rate over: a socket delivers in bursts
BUSY_SHARE = 0.8  # a bin counts when the source could send during this share of it
RECENT_S = 0.1
BASELINE_S = 1.0
WARM_UP_S = 0.2  # measured time before the baseline means something
SLOW_BELOW = 0.7  # of the baseline
LARGEST_SHORTFALL = 0.33
# Seconds of baseline missing below SLOW_BELOW. Reached after 0.15 s of silence or at a quarter of the baseline, after
# 0.25 s at half, after 0.5 s at 0.6 of it.
CUSUM_ALARM_S = 0.05
RECOVERED_AT = 0.75
RECOVERED_SHARING_AT = 0.5  # when another source shares the incoming link


@dataclass(slots=True)
class DecayingRate:
    """Bytes per second, exponentially averaged over about ``DECAY_S``."""

    begun_at: float
    _level: float = 0.0
    _at: float = 0.0

    def add(self, num_bytes: int, now: float) -> None:
        self._level = self._decayed(now) + num_bytes
        self._at = now

    def bytes_per_s(self, now: float) -> float:
        span = max(now - self.begun_at, BIN_S)
        return self._decayed(now) / (DECAY_S * (1 - math.exp(-span / DECAY_S)))

    def _decayed(self, now: float) -> float:
        return self._level * math.exp(-max(now - self._at, 0.0) / DECAY_S)


@dataclass(slots=True)
class RateMonitor:
    """The rate of a source while it could send, and whether it has fallen well below its baseline.

    Time in which the source had nothing to send does not count. The drop is detected by summing the shortfall (Page's
    CUSUM, 1954): a short gap is forgotten, and a lasting gap raises the alarm sooner the deeper it is.
    """

    recent: float = 0.0  # bytes per second; 0: not measured yet
    baseline: float = 0.0
    slow: bool = False
    _measured_s: float = 0.0
    _shortfall: float = 0.0  # bytes
    _bytes: int = 0
    _busy_s: float = 0.0
    _bin_s: float = 0.0

    def record(self, num_bytes: int, span_s: float, *, busy: bool, sharing: bool) -> None:
        """Adds the bytes that arrived in the last ``span_s``. ``busy``: the source could send in that time."""
        self._bytes += num_bytes
        self._bin_s += span_s
        if busy:
            self._busy_s += span_s
        if self._bin_s >= BIN_S:
            rate = self._bytes / self._bin_s
            self._measured_s += self._bin_s
            if self._busy_s >= BUSY_SHARE * self._bin_s:
                self._measure(rate, self._bin_s, sharing)
            elif not self.slow:  # it had little to send, so it can deliver at least this much
                self._update_baseline(max(rate, self.baseline), self._bin_s)
                self._update_recent(max(rate, self.recent), self._bin_s)
            self._bytes, self._busy_s, self._bin_s = 0, 0.0, 0.0

    def _measure(self, rate: float, span_s: float, sharing: bool) -> None:
        self._update_recent(rate, span_s)
        if self.slow:  # the baseline is kept until the rate has recovered
            if self.recent >= self.baseline * (RECOVERED_SHARING_AT if sharing else RECOVERED_AT):
                self.slow, self._shortfall = False, 0.0
            return
        missing = SLOW_BELOW * self.baseline - rate
        if self._measured_s < WARM_UP_S or missing <= 0:  # a falling rate does not lower the baseline
            self._update_baseline(rate, span_s)
        if self._measured_s >= WARM_UP_S:
            missing = min(missing, LARGEST_SHORTFALL * self.baseline)
            self._shortfall = max(0.0, self._shortfall + missing * span_s)
            self.slow = self._shortfall > CUSUM_ALARM_S * self.baseline

    def _update_recent(self, rate: float, span_s: float) -> None:
        self.recent = _ewma(self.recent, rate, span_s, min(RECENT_S, self._measured_s))

    def _update_baseline(self, rate: float, span_s: float) -> None:
        self.baseline = _ewma(self.baseline, rate, span_s, min(BASELINE_S, self._measured_s))


def _ewma(before: float, rate: float, span_s: float, over_s: float) -> float:
    """The mean over about the last ``over_s``; ``before`` is the previous mean, 0: there is none."""
    return before + (rate - before) * (1.0 - math.exp(-span_s / over_s)) if before else rate
