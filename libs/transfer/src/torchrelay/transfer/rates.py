"""How fast bytes come: a rate to show, and a gauge that tells when a source has turned slow. Pure; time is given."""

from __future__ import annotations

import math
from dataclasses import dataclass

SHOWN_S = 0.5  # what "of late" means
CELL_S = 0.025  # bytes are counted over at least so long: a socket hands them out in bursts
BUSY_SHARE = 0.8  # a cell counts when the source could have sent for so much of it
RECENT_S = 0.1
EARLIER_S = 1.0
KNOWN_S = 0.2  # so much must have been measured before "earlier" means something
SLOW_BELOW = 0.7  # of the earlier rate
LARGEST_SHORTFALL = 0.33
ALARM_S = (
    0.05  # what is missing to SLOW_BELOW, summed: 0.15 s of silence or at a quarter, 0.25 s at a half, 0.5 s at 0.6
)
RECOVERED_AT = 0.75
RECOVERED_SHARING_AT = 0.5  # another source takes its part of the way in


@dataclass(slots=True)
class ShownRate:
    """Bytes per second over the last half second or so, fading."""

    begun_at: float
    _level: float = 0.0
    _at: float = 0.0

    def add(self, num_bytes: int, now: float) -> None:
        self._level = self._faded(now) + num_bytes
        self._at = now

    def bytes_per_s(self, now: float) -> float:
        span = max(now - self.begun_at, CELL_S)
        return self._faded(now) / (SHOWN_S * (1 - math.exp(-span / SHOWN_S)))

    def _faded(self, now: float) -> float:
        return self._level * math.exp(-max(now - self._at, 0.0) / SHOWN_S)


@dataclass(slots=True)
class Gauge:
    """One source's rate while it could send, and whether it has fallen well below what it was.

    Time in which the source had nothing to send does not count. The fall is found by summing up what is missing
    (Page's CUSUM, 1954): a short gap is forgotten, a lasting one raises the alarm the sooner the deeper it is.
    """

    recent: float = 0.0  # bytes per second; 0: not measured yet
    earlier: float = 0.0
    slow: bool = False
    _known_s: float = 0.0
    _shortfall: float = 0.0  # bytes
    _bytes: int = 0
    _busy_s: float = 0.0
    _cell_s: float = 0.0

    def note(self, num_bytes: int, span_s: float, *, busy: bool, sharing: bool) -> None:
        """``num_bytes`` came during the last ``span_s``, in which the source could send (``busy``) or not."""
        self._bytes += num_bytes
        self._cell_s += span_s
        if busy:
            self._busy_s += span_s
        if self._cell_s >= CELL_S:
            rate = self._bytes / self._cell_s
            self._known_s += self._cell_s
            if self._busy_s >= BUSY_SHARE * self._cell_s:
                self._measure(rate, self._cell_s, sharing)
            elif not self.slow:  # it had little to send: at least so much it can bring
                self._learn(max(rate, self.earlier), self._cell_s)
                self._follow(max(rate, self.recent), self._cell_s)
            self._bytes, self._busy_s, self._cell_s = 0, 0.0, 0.0

    def _measure(self, rate: float, span_s: float, sharing: bool) -> None:
        self._follow(rate, span_s)
        if self.slow:  # what it was stays the measure until it is that again
            if self.recent >= self.earlier * (RECOVERED_SHARING_AT if sharing else RECOVERED_AT):
                self.slow, self._shortfall = False, 0.0
            return
        missing = SLOW_BELOW * self.earlier - rate
        if self._known_s < KNOWN_S or missing <= 0:  # while it falls, what it was is not forgotten
            self._learn(rate, span_s)
        if self._known_s >= KNOWN_S:
            missing = min(missing, LARGEST_SHORTFALL * self.earlier)
            self._shortfall = max(0.0, self._shortfall + missing * span_s)
            self.slow = self._shortfall > ALARM_S * self.earlier

    def _follow(self, rate: float, span_s: float) -> None:
        self.recent = _mixed(self.recent, rate, span_s, min(RECENT_S, self._known_s))

    def _learn(self, rate: float, span_s: float) -> None:
        self.earlier = _mixed(self.earlier, rate, span_s, min(EARLIER_S, self._known_s))


def _mixed(before: float, rate: float, span_s: float, over_s: float) -> float:
    """The mean over about the last ``over_s``; 0 stands for none yet."""
    return before + (rate - before) * (1.0 - math.exp(-span_s / over_s)) if before else rate
