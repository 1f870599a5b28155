"""Times at which versions are due without another input: for waiting requests to be placed, or for idle instances to be
drained.
"""

from __future__ import annotations

import heapq
import math

_MOST_STALE = 64


class DueTimes(dict[str, float]):
    """Due time of each version, with the earliest from a heap."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[float, str]] = []  # including stale entries

    def __setitem__(self, version_id: str, at: float) -> None:
        super().__setitem__(version_id, at)
        heapq.heappush(self._heap, (at, version_id))
        if len(self._heap) > 2 * len(self) + _MOST_STALE:
            self._heap = [(at, version_id) for version_id, at in self.items()]
            heapq.heapify(self._heap)

    def note(self, version_id: str, at: float) -> None:
        """Sets the due time unless the version has an earlier one."""
        if at < self.get(version_id, math.inf):
            self[version_id] = at

    def passed(self, now: float) -> list[str]:
        """Removes and returns the versions that are due."""
        passed = []
        while self.earliest <= now:
            version_id = heapq.heappop(self._heap)[1]
            del self[version_id]
            passed.append(version_id)
        return passed

    @property
    def earliest(self) -> float:
        """The earliest due time; infinite without any."""
        heap = self._heap
        while heap and self.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf
