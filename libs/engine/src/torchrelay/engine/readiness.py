"""Which segments of the pack may be computed with; set by whoever verifies bytes, awaited by the engine thread."""

from __future__ import annotations

import threading

from torchrelay.engine import profile
from torchrelay.engine.core import LoadFailed
from torchrelay.engine.profile import Share


class SegmentGate:
    """One flag per segment. A segment once open stays open; after ``fail`` the others never open."""

    def __init__(self, num_segments: int) -> None:
        self._open = [False] * num_segments
        self._num_open = 0
        self._failure: str | None = None
        self._changed = threading.Condition()

    @property
    def num_open(self) -> int:
        return self._num_open

    @property
    def all_open(self) -> bool:
        return self._num_open == len(self._open)

    def is_open(self, segment: int) -> bool:
        return self._open[segment]

    def open(self, segment: int) -> None:
        """(any thread) Idempotent."""
        with self._changed:
            if not self._open[segment]:
                self._open[segment] = True
                self._num_open += 1
                self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """(any thread) Wakes whoever waits for a segment that is not open."""
        with self._changed:
            self._failure = reason
            self._changed.notify_all()

    def wait(self, segment: int) -> None:
        """Returns once the segment is open. Raises ``LoadFailed`` when it never will be."""
        if self._open[segment]:
            return
        with self._changed:
            before = profile.enter(Share.IO_WAIT)
            self._changed.wait_for(lambda: self._open[segment] or self._failure is not None)
            profile.enter(before)
            if not self._open[segment]:
                raise LoadFailed(f"segment {segment} of the weights did not arrive: {self._failure}")
