"""The processes that compute on this host's cores right now, in a file that they share.

Two thread teams on the same cores wait for each other's time slices at every barrier, about a hundred per step: two
workers on two cores gave a quarter to a half of the tokens of one worker. So each process takes its share of the cores
while others compute; what a process with few threads leaves of its share, the others divide. A number that changes
whenever a process starts or rests interrupts long calls of the others.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

from torchrelay.common.host.file_locks import own_range

MAX_PROCESSES: Final = 64
# How long a process still counts that was killed or waits for bytes: longer than any layer should take.
ACTIVE_FOR_S: Final = 1.0


class ActiveProcesses:
    """A process's entry in the file: the time until which others count it, and the most cores that it computes on. A
    lock on the entry shows that it is taken.

    The int64 at ``change_address`` is the time when a process last started or rested. It differs from ``change_seen``
    if a process has done so since this process last counted.
    """

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.monotonic, max_processes: int = MAX_PROCESSES
    ) -> None:
        """Takes a free entry. Raises ``OSError`` if there is none."""
        self._clock = clock
        with path.open("a+b") as file:
            num_bytes = 16 * max_processes + 8
            os.ftruncate(file.fileno(), num_bytes)
            self._entry = _take_entry(path, file.fileno(), max_processes)
            memory = mmap.mmap(file.fileno(), num_bytes)  # keeps the open file, and so the lock
        self._until_s = np.frombuffer(memory, np.float64, max_processes)
        self._change = np.frombuffer(memory, np.int64, 1, offset=8 * max_processes)
        self._most_cores = np.frombuffer(memory, np.int64, max_processes, offset=8 * max_processes + 8)
        # Entries of an earlier boot, whose clock was further ahead, would count for too long.
        self._until_s[self._until_s > clock() + ACTIVE_FOR_S] = 0.0
        self.change_address, self.change_seen = int(self._change.ctypes.data), int(self._change[0])
        self._until_s[self._entry] = 0.0

    def take_share(self, num_cores: int, most: int) -> int:
        """Marks this process as computing on at most ``most`` cores; returns its share of ``num_cores``."""
        now_s = self._clock()
        begins = self._until_s[self._entry] <= now_s
        if self._most_cores[self._entry] != most:
            self._most_cores[self._entry], begins = most, True
        self._until_s[self._entry] = now_s + ACTIVE_FOR_S  # before notifying: a notified process counts this one
        if begins:
            self._notify()
        self.change_seen = int(self._change[0])  # before counting: later changes interrupt
        return fair_share(num_cores, most, self._most_cores[self._until_s > now_s].tolist())

    def rest(self) -> None:
        """Marks this process as not computing."""
        if self._until_s[self._entry]:
            self._until_s[self._entry] = 0.0
            self._notify()

    def _notify(self) -> None:
        self._change[0] = time.monotonic_ns()  # not a counter: of two simultaneous increments one would be lost


def fair_share(num_cores: int, most: int, of_all: Sequence[int]) -> int:
    """The cores of a process that takes at most ``most``, at least one. All get the same, except that none gets more
    than it takes: the others divide the rest. ``of_all``: the most that each process takes, this one included.
    """
    left, num_left = num_cores, len(of_all)
    for taken in sorted(of_all):
        if taken * num_left >= left:
            break
        left, num_left = left - taken, num_left - 1
    return max(1, min(most, left // num_left if num_left else most))


def _take_entry(path: Path, file: int, max_processes: int) -> int:
    """Locks the first free entry of the file and returns its index."""
    for entry in range(max_processes):
        with suppress(BlockingIOError):
            own_range(file, 8 * entry, 8)
            return entry
    raise OSError(f"{path} is full: {max_processes} processes compute on this host")
