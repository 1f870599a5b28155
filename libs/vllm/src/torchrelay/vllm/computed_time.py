"""The progress of a thread that runs foreign code for long: the time that it has computed."""

from __future__ import annotations

import threading
import time


class ComputedTime:
    """CPU time of the thread that makes this; it stands still while the thread waits for a lock or another process."""

    def __init__(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())

    @property
    def tenths(self) -> int:
        """(any thread) Whole tenths of a second, while the thread lives."""
        return int(time.clock_gettime(self._clock) * 10)
