"""Deadlines at which versions may have been unused for their idle timeout, so that they are evaluated right then."""

from __future__ import annotations

import heapq
import math


class IdleDeadlines:
    """At most one deadline per version; it may be too early."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._noted: dict[str, float] = {}

    def __contains__(self, version_id: str) -> bool:
        return version_id in self._noted

    def note(self, version_id: str, at: float) -> None:
        """Notes a deadline, unless the version has one that is as early."""
        if at < self._noted.get(version_id, math.inf):
            self._noted[version_id] = at
            heapq.heappush(self._heap, (at, version_id))

    def take(self, now: float) -> list[str]:
        """Removes and returns the versions whose deadline has passed."""
        passed = []
        while self._heap and self._heap[0][0] <= now:
            at, version_id = heapq.heappop(self._heap)
            if self._noted.get(version_id) == at:
                del self._noted[version_id]
                passed.append(version_id)
        return passed
