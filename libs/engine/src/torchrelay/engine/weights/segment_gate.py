"""The segments of the pack that are ready: set by the thread that verifies them, read by the engine thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torchrelay.engine.core import LoadFailed


class SegmentGate:
    """A flag per segment. An open segment stays open; after ``fail`` the other segments never open.

    ``on_change`` is called after each change, on the thread that made it.
    """

    def __init__(self, num_segments: int) -> None:
        self._open = [False] * num_segments
        self._num_open = 0
        self.failure = ""  # why no more segments will open
        self._lock = threading.Lock()
        self.on_change: Callable[[], None] = lambda: None

    @property
    def num_open(self) -> int:
        return self._num_open

    @property
    def all_open(self) -> bool:
        return self._num_open == len(self._open)

    @property
    def all_settled(self) -> bool:
        """Whether each segment is open or never will be."""
        return self.all_open or bool(self.failure)

    def is_open(self, segment: int) -> bool:
        return self._open[segment]

    def open(self, segment: int) -> None:
        """(any thread) Opens a segment. Idempotent."""
        with self._lock:
            if self._open[segment]:
                return
            self._open[segment] = True
            self._num_open += 1
        self.on_change()

    def fail(self, reason: str) -> None:
        """(any thread) Declares that the segments that are not open never will be."""
        self.failure = reason
        self.on_change()

    def require(self, segment: int) -> None:
        """Raises ``LoadFailed`` if the segment is not open."""
        if not self._open[segment]:
            reason = self.failure or "it is still to come"
            raise LoadFailed(f"segment {segment} of the weights did not arrive: {reason}")
