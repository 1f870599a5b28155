"""The segments of the pack that are ready: set by the thread that verifies them, awaited by the engine thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from torchrelay.engine import profile
from torchrelay.engine.core import LoadFailed
from torchrelay.engine.profile import Activity

_MAX_WAIT_S: Final = 3600.0  # a lock's timeout is bounded


class SegmentGate:
    """A flag per segment. An open segment stays open; after ``fail`` the other segments never open.

    ``on_change`` is called after each change, on the thread that made it.
    """

    def __init__(self, num_segments: int) -> None:
        self._open = [False] * num_segments
        self._num_open = 0
        self._failure: str | None = None
        self._changed = threading.Condition()
        self.on_change: Callable[[], None] = lambda: None

    @property
    def num_open(self) -> int:
        return self._num_open

    @property
    def all_open(self) -> bool:
        return self._num_open == len(self._open)

    def is_open(self, segment: int) -> bool:
        return self._open[segment]

    def is_settled(self, segment: int) -> bool:
        """Whether the segment is open or never will be, so that ``wait`` would not block."""
        return self._open[segment] or self._failure is not None

    def open(self, segment: int) -> None:
        """(any thread) Opens a segment. Idempotent."""
        with self._changed:
            if self._open[segment]:
                return
            self._open[segment] = True
            self._num_open += 1
            self._changed.notify_all()
        self.on_change()

    def fail(self, reason: str) -> None:
        """(any thread) Makes waits for segments that are not open raise ``LoadFailed``."""
        with self._changed:
            self._failure = reason
            self._changed.notify_all()
        self.on_change()

    def wake(self) -> None:
        """(any thread) Makes waiting threads check again for a reason to stop."""
        with self._changed:
            self._changed.notify_all()

    def wait(
        self, segment: int, at_most_s: float | None = None, has_reason_to_stop: Callable[[], object] = lambda: False
    ) -> bool:
        """Returns True once the segment is open; False after ``at_most_s``, or when woken with a reason to stop.

        Raises ``LoadFailed`` if the segment will never be open.
        """
        if self._open[segment]:
            return True
        with self._changed:
            before = profile.enter(Activity.IO_WAIT)
            self._changed.wait_for(
                lambda: self.is_settled(segment) or has_reason_to_stop(),
                None if at_most_s is None else min(at_most_s, _MAX_WAIT_S),
            )
            profile.enter(before)
            if not self._open[segment] and self._failure is not None:
                raise LoadFailed(f"segment {segment} of the weights did not arrive: {self._failure}")
            return self._open[segment]
