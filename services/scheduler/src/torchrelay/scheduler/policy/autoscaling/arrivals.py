"""Arrivals of each model's requests, and the gaps in which it was unused."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from torchrelay.common.recent import Recent
from torchrelay.scheduler.policy.autoscaling.price import IdleGaps, IdlePlan

WINDOW_S = 10.0  # the next seconds are expected to have the demand of the last 10 seconds
MEAN_S = 600.0  # time constant of the exponential mean rate
_MAX_ARRIVALS = 1024  # counted per window
_MAX_LATE = 64
_MAX_VERSIONS = 4096
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
class ArrivalHistory:
    """The arrivals of one version."""

    idle_gaps: IdleGaps = field(default_factory=IdleGaps)
    target_s: float = 0.0  # recent mean target for the first token; 0: no request came
    last_used: float | None = None  # the last arrival or end of a request
    last_full_at: float = 0.0  # when all its instances were last needed
    decode_last_full_at: float = 0.0  # when all instances that only decode were last needed
    _late: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_LATE))
    _came: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_MAX_ARRIVALS))
    _num_tokens: int = 0
    _mean: MeanRate | None = None

    def arrive(
        self, num_tokens: int, target_s: float, price_s: float, load_s: float, now: float, *, is_unused: bool
    ) -> None:
        """Records an arrival. ``is_unused``: no other request of the version is open. ``load_s``: load time."""
        if is_unused and self.last_used is not None:
            self.idle_gaps.add(now - self.last_used, price_s, load_s)
        self.last_used = now
        self.target_s += (target_s - self.target_s) * (_NEWEST if self.target_s else 1.0)
        if len(self._came) == _MAX_ARRIVALS:
            self._num_tokens -= self._came[0][1]
        self._came.append((now, num_tokens))
        self._num_tokens += num_tokens
        if self._mean is None:
            self._mean = MeanRate(now)
        self._mean.arrive(now)

    def forecast(self, plan: IdlePlan) -> tuple[float, float]:
        """When to load the model again before the next request, and until when to hold it."""
        if self.last_used is None or math.isinf(plan.wake_s):
            return NEVER
        return self.last_used + plan.wake_s, self.last_used + plan.until_s

    def return_s(self, now: float) -> float:
        """Expected seconds until the next use."""
        return self.idle_gaps.return_s(now - self.last_used if self.last_used is not None else math.inf)

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


class Arrivals:
    """Histories by version; the longest unused versions are evicted first."""

    def __init__(self) -> None:
        self._of: Recent[str, ArrivalHistory] = Recent(_MAX_VERSIONS)

    def of(self, version_id: str) -> ArrivalHistory:
        history = self._of.get(version_id)
        if history is None:
            history = self._of[version_id] = ArrivalHistory()
        else:
            self._of.move_to_end(version_id)
        return history

    def known(self, version_id: str) -> ArrivalHistory | None:
        """The history of a version; None if nothing is known of it."""
        return self._of.get(version_id)

    def forget(self, version_id: str) -> None:
        """Forgets the version: no more requests are expected."""
        self._of.pop(version_id, None)

    def used(self, version_id: str, now: float) -> None:
        """Records the end of a request of the version."""
        if (history := self._of.get(version_id)) is not None:
            history.last_used = now
