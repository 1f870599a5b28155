"""The progress of a thread that runs foreign code for long: the time that it has computed."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ComputedTime:
    """CPU time of the thread that makes this; it stands still while the thread waits for a lock or another process."""

    def __init__(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())

    @property
    def tenths(self) -> int:
        """(any thread) Whole tenths of a second, while the thread lives."""
        return int(time.clock_gettime(self._clock) * 10)


def main_thread_tenths(pid: int) -> int:
    """Tenths of a second that the main thread of a process has computed; its other threads may spin for ever."""
    try:
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return 0
    in_user, in_system = fields[11:13]
    return (int(in_user) + int(in_system)) * 10 // _TICKS_PER_S
