"""Virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Event:
    """A call due at a time; after ``cancel`` it is never made."""

    __slots__ = ("at", "call")

    def __init__(self, at: float, call: Callable[[], None]) -> None:
        self.at = at
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class EventQueue:
    """Calls in order of time; calls of the same time are made in the order in which they were added."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._heap: list[tuple[float, int, Event]] = []
        self._sequence = count()

    def at(self, at: float, call: Callable[[], None]) -> Event:
        """Schedules ``call`` for ``at``, or for now if that is past."""
        event = Event(max(at, self.now), call)
        heapq.heappush(self._heap, (event.at, next(self._sequence), event))
        return event

    def after(self, delay_s: float, call: Callable[[], None]) -> Event:
        return self.at(self.now + delay_s, call)

    def run(self, until: float = float("inf")) -> None:
        """Makes all calls due by ``until`` and sets ``now`` to it, unless it is infinite."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            at, _, event = heapq.heappop(heap)
            if event.call is not None:
                self.now = at
                event.call()
        if until != float("inf"):
            self.now = max(self.now, until)
