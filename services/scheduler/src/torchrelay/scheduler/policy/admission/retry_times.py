"""Retry times of refused clients, each after those of the clients that were refused before."""

from __future__ import annotations

from torchrelay.common.recent import Recent
from torchrelay.scheduler.policy.types import MAX_VERSIONS

MIN_S, MAX_S = 1.0, 60.0


class RetryTimes:
    """The last retry time given out for each version's queue."""

    def __init__(self) -> None:
        self._last_at: Recent[str, float] = Recent(MAX_VERSIONS)

    def retry_s(self, version_id: str, places_per_s: float, load_left_s: float, now: float) -> float:
        """Seconds after which the client refused now may retry. ``load_left_s``: until requests are served at all."""
        after_s = max(self._last_at.get(version_id, now) - now, load_left_s) + 1 / places_per_s
        self._last_at[version_id] = now + min(after_s, MAX_S)
        return min(max(after_s, MIN_S), MAX_S)
