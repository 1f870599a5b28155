"""Retry times of refused clients, each after those of the clients that were refused before."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass, field

from cachetools import LRUCache

from torchrelay.scheduler.policy.core import MAX_VERSIONS

MIN_S, MAX_S = 1.0, 60.0
_STEP_S = 0.1  # retry times within a step are counted together, so that memory does not grow with their number


@dataclass(slots=True)
class _PendingRetries:
    """Retry times given to clients that are still in the future."""

    num: int = 0
    steps: list[int] = field(default_factory=list)  # a heap
    num_at: Counter[int] = field(default_factory=Counter)  # by step

    def add(self, at: float) -> None:
        step = math.ceil(at / _STEP_S)
        if step not in self.num_at:
            heapq.heappush(self.steps, step)
        self.num_at[step] += 1
        self.num += 1

    def expire(self, now: float) -> None:
        while self.steps and self.steps[0] * _STEP_S <= now:
            self.num -= self.num_at.pop(heapq.heappop(self.steps))


class RetryTimes:
    """Retry times given out for each version's queue."""

    def __init__(self) -> None:
        self._of: LRUCache[str, _PendingRetries] = LRUCache(MAX_VERSIONS)

    def retry_s(self, version_id: str, places_per_s: float, load_left_s: float, now: float) -> float:
        """Seconds after which the client refused now may retry. ``load_left_s``: until requests are served at all."""
        pending = self._of.setdefault(version_id, _PendingRetries())
        pending.expire(now)
        after_s = min(max(load_left_s + (pending.num + 1) / places_per_s, MIN_S), MAX_S)
        pending.add(now + after_s)
        return after_s
