"""The number of threads of a computation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from torchrelay.engine.kernels.cpu.active_processes import ActiveProcesses

# Bytes of weights. A step with fewer takes about as long on one core as on two. With two threads beside another
# program, each wait for a thread that was off its core took milliseconds, and an answer 5 s instead of 0.1 s.
MAX_ONE_THREAD_BYTES: Final = 16 << 20


@contextmanager
def one_thread() -> Iterator[None]:
    """Uses one thread for small work, after which a second thread would spin for as long as it helped."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class ThreadBudget:
    """This process's share of the cores, while other processes compute on them.

    Until all weights have arrived one core is left to the threads that receive and verify them: a computation on all
    cores delays the last layer by more than it gains. A model of fewer than ``one_thread_bytes`` gets one thread, and
    none gets more than ``max_threads``, if that is not 0; its other cores are left to the other processes.
    """

    def __init__(
        self,
        num_weight_bytes: int,
        active_processes: ActiveProcesses | None = None,
        one_thread_bytes: int = MAX_ONE_THREAD_BYTES,
        max_threads: int = 0,
    ) -> None:
        self._active_processes = active_processes
        self._num_threads = torch.get_num_threads()
        most = self._num_threads if num_weight_bytes >= one_thread_bytes else 1
        self._max_threads = min(max_threads or most, most)
        self._num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def adjust(self, is_loaded: bool) -> None:
        """Sets the number of threads, before each layer or call of several layers; cheap while nothing changes."""
        wanted = self._max_threads
        if self._active_processes is not None:
            wanted = self._active_processes.take_share(self._num_cores, self._max_threads)
        if not is_loaded:
            wanted = max(1, wanted - 1)
        self._set(wanted)

    def rest(self) -> None:
        """Leaves all cores to other processes while there is nothing to compute."""
        if self._active_processes is not None:
            self._active_processes.rest()

    def restore(self) -> None:
        """Restores all threads for the next computation on this thread."""
        self.rest()
        self._set(self._num_threads)

    def _set(self, wanted: int) -> None:
        if wanted != torch.get_num_threads():
            torch.set_num_threads(wanted)
