"""Who computes on this host's cores right now: a file that the processes of one host share.

Two teams of threads on the same cores wait for each other's time slices at every barrier, of which a step has a
hundred: two workers on two cores gave a quarter to a half of the tokens of one. So each takes its part while the other
computes; a number that changes whenever one begins or rests calls those back that compute for long.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

MAX_PROCESSES: Final = 64
# A process that was killed, or waits for bytes, is thought to compute for so long. Longer than any layer should take.
ACTIVE_FOR_S: Final = 1.0


class ActiveProcesses:
    """One process's place in the file: its pid, and until when others are to count it.

    At ``change_address`` lies an int64, when somebody last began or rested: it is no more ``change_seen`` once somebody
    has since this process last counted.
    """

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.monotonic, max_processes: int = MAX_PROCESSES
    ) -> None:
        """Takes a place that nobody has, or whose process is gone. Raises ``OSError`` when there is none."""
        self._clock = clock
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                file.truncate(16 * max_processes + 8)
                memory = mmap.mmap(file.fileno(), 16 * max_processes + 8)
                pids = np.frombuffer(memory, np.int64, max_processes)
                self._until_s = np.frombuffer(memory, np.float64, max_processes, offset=8 * max_processes)
                self._change = np.frombuffer(memory, np.int64, 1, offset=16 * max_processes)
                free = [place for place, pid in enumerate(pids.tolist()) if not _is_running(pid)]
                if not free:
                    raise OSError(f"{path} has no place left: {max_processes} processes compute on this host")
                # Of a boot before this one, whose clock had gone further: they would count for as long as that had run.
                self._until_s[self._until_s > clock() + ACTIVE_FOR_S] = 0.0
                self._entry = free[0]
                self.change_address, self.change_seen = int(self._change.ctypes.data), int(self._change[0])
                self._until_s[self._entry] = 0.0
                pids[self._entry] = os.getpid()
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # NOTE: closing does not: the mapping keeps the file open

    def count_computing(self) -> int:
        """This process computes from now on; how many do, with it."""
        now_s = self._clock()
        begins = self._until_s[self._entry] <= now_s
        self._until_s[self._entry] = now_s + ACTIVE_FOR_S  # before it is said: whoever hears of it counts it
        if begins:
            self._notify()
        self.change_seen = int(self._change[0])  # before counting: what comes later calls back
        return int(np.count_nonzero(self._until_s > now_s))

    def rest(self) -> None:
        """It computes no more."""
        if self._until_s[self._entry]:
            self._until_s[self._entry] = 0.0
            self._notify()

    def _notify(self) -> None:
        self._change[0] = time.monotonic_ns()  # no count: of two who add at the same moment one would be lost


def _is_running(pid: int) -> bool:
    if not pid:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
