"""The demand that each model has shown: its arrivals, and the gaps in which it was unused."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from torchrelay.scheduler.policy.estimates.requests import AnswerLength, CachedShare, Callers

WINDOW_S = 10.0  # the next seconds are expected to have the demand of the last 10 seconds
_NUM_GAPS = 64
_MIN_GAPS = 8  # with fewer, no use is expected at a certain time
_LEAST_IDLE_S = 1.0
_PARTS = (1.0, *(0.5**number for number in range(1, 7)), 0.0)  # of the break-even time, that a slot may be kept
_COSTS_KEPT = 0.5 ** (1 / 32)  # after each gap
_LEAST_LOADS_SAVED = 3
_LOADS_EARLY = 1.5
MEAN_S = 600.0  # time constant of the exponential mean rate
_MAX_ARRIVALS = 1024  # counted per window
_MAX_LATE = 64
NEVER = (math.inf, math.inf)
_NEWEST = 0.1  # weight of the newest target


@dataclass(frozen=True, slots=True)
class ArrivalRate:
    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0  # of prompts


NO_ARRIVALS: Final = ArrivalRate()


@dataclass(slots=True)
class MeanRate:
    """Exponential mean of the requests per second since ``begun_at``."""

    begun_at: float
    _num: float = 0.0
    _at: float = 0.0

    def arrive(self, now: float) -> None:
        self._num, self._at = self._num_at(now) + 1.0, now

    def requests_per_s(self, now: float) -> float:
        known_s = MEAN_S * -math.expm1(-max(now - self.begun_at, WINDOW_S) / MEAN_S)
        return self._num_at(now) / known_s

    def _num_at(self, now: float) -> float:
        return self._num * math.exp((self._at - now) / MEAN_S) if self._num else 0.0


@dataclass(slots=True)
class Gaps:
    """Recent gaps between uses of a model, and what they would have cost for each time that its slot is kept."""

    _gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_GAPS))
    _costs_s: list[float] = field(default_factory=lambda: [0.0] * len(_PARTS))  # by part; older gaps count less
    _spare_s: float = 0.0  # twice the optimum of all gaps, less what they cost

    def add(self, gap_s: float, cold_s: float) -> None:
        """``cold_s``: cost of a load, in seconds of a slot."""
        kept_s = self.keep_s(cold_s)
        self._spare_s += 2 * min(gap_s, cold_s) - (gap_s if gap_s <= kept_s else kept_s + cold_s)
        self._gaps_s.append(gap_s)
        for number, part in enumerate(_PARTS):
            kept_s = part * cold_s
            cost_s = gap_s if gap_s <= kept_s else kept_s + cold_s
            self._costs_s[number] = _COSTS_KEPT * self._costs_s[number] + cost_s

    def keep_s(self, cold_s: float) -> float:
        """How long to keep an unused slot: the break-even time, with which no gap costs more than twice the optimum
        (ski rental), or the part of it that would have cost at least ``_LEAST_LOADS_SAVED`` loads less, as long as all
        gaps together cost no more than that.
        """
        least = min(self._costs_s)
        if self._costs_s[0] - least < _LEAST_LOADS_SAVED * cold_s or self._spare_s < 0:
            return cold_s
        return _PARTS[self._costs_s.index(least)] * cold_s

    def window(self, load_s: float, keep_s: float) -> tuple[float, float]:
        """When to load a model again that is not kept, and until when to hold it, in seconds since its last use.

        After M. Shahrad et al., "Serverless in the Wild" (USENIX ATC 2020): the middle of the gaps that are longer than
        ``keep_s``, if holding the slot for all of it costs no more than keeping it.
        """
        longer = sorted(gap_s for gap_s in self._gaps_s if gap_s > keep_s)
        if len(longer) < _MIN_GAPS:
            return NEVER
        num_left_out = len(longer) // 20
        earliest_s, latest_s = longer[num_left_out], longer[-1 - num_left_out]
        return (earliest_s - _LOADS_EARLY * load_s, latest_s) if latest_s - earliest_s <= keep_s else NEVER

    def next_use_s(self, idle_s: float) -> float:
        """Expected seconds until the next use of a model that has been unused for ``idle_s``: the mean time left of the
        longer gaps, and of one more gap that lasts as long again.
        """
        left_s = [gap_s - idle_s for gap_s in self._gaps_s if gap_s > idle_s]
        return (max(idle_s, _LEAST_IDLE_S) + sum(left_s)) / (1 + len(left_s))


@dataclass(slots=True)
class Usage:
    """All that is learned of a version's requests."""

    answers: AnswerLength = field(default_factory=AnswerLength)
    prompts: CachedShare = field(default_factory=CachedShare)
    callers: Callers = field(default_factory=Callers)
    gaps: Gaps = field(default_factory=Gaps)
    target_s: float = 0.0  # recent mean target for the first token; 0: no request came
    last_used: float | None = None  # the last arrival or end of a request
    last_full_at: float = 0.0  # when all its instances were last needed
    decode_last_full_at: float = 0.0  # when all instances that only decode were last needed
    _late: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_LATE))
    _came: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_MAX_ARRIVALS))
    _num_tokens: int = 0
    _mean: MeanRate | None = None

    def arrive(self, num_tokens: int, target_s: float, cold_s: float, now: float, *, is_unused: bool) -> None:
        """Records an arrival. ``is_unused``: no other request of the version is open. ``cold_s``: cost of a load."""
        if is_unused and self.last_used is not None:
            self.gaps.add(now - self.last_used, cold_s)
        self.last_used = now
        self.target_s += (target_s - self.target_s) * (_NEWEST if self.target_s else 1.0)
        if len(self._came) == _MAX_ARRIVALS:
            self._num_tokens -= self._came[0][1]
        self._came.append((now, num_tokens))
        self._num_tokens += num_tokens
        if self._mean is None:
            self._mean = MeanRate(now)
        self._mean.arrive(now)

    def window(self, load_s: float, keep_s: float) -> tuple[float, float]:
        """When to load the model again before the next request, and until when to hold it."""
        begin_s, end_s = self.gaps.window(load_s, keep_s)
        return NEVER if self.last_used is None else (self.last_used + begin_s, self.last_used + end_s)

    def next_use_s(self, now: float) -> float:
        """Expected seconds until the next use."""
        return self.gaps.next_use_s(now - self.last_used if self.last_used is not None else math.inf)

    def late(self, admitted_at: float) -> None:
        """Notes a request whose first token missed its target, though the instance was loaded when the request came."""
        self._late.append(admitted_at)

    def num_late(self, since: float) -> int:
        return sum(at > since for at in self._late)

    def rate(self, now: float) -> ArrivalRate:
        while self._came and self._came[0][0] <= now - WINDOW_S:
            self._num_tokens -= self._came.popleft()[1]
        if not self._came:
            return NO_ARRIVALS
        since_s = now - self._came[0][0] if len(self._came) == _MAX_ARRIVALS else WINDOW_S
        return ArrivalRate(len(self._came) / max(since_s, 1.0), self._num_tokens / max(since_s, 1.0))

    def expected_per_s(self, now: float) -> float:
        """Requests expected per second: the recent rate, or the long-run mean if that is higher, because a pause
        between bursts does not mean that no more requests will come.
        """
        return max(self.rate(now).requests_per_s, self.mean_per_s(now))

    def mean_per_s(self, now: float) -> float:
        """Long-run mean of the requests per second."""
        return self._mean.requests_per_s(now) if self._mean is not None else 0.0
