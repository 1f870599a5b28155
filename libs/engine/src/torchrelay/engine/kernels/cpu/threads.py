"""How many cores a computation takes: fewer than all where that leaves room for what it waits for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from torchrelay.engine.kernels.cpu.active_processes import ActiveProcesses

# Of weights. A step of fewer takes about as long on one core; on two, while another program ran beside, each wait for a
# thread that was off its core took milliseconds, and an answer 5 s instead of 0.1.
MAX_ONE_THREAD_BYTES: Final = 16 << 20


@contextmanager
def one_thread() -> Iterator[None]:
    """On this thread: for small work, after which a second core would spin for as long as it helped."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class ThreadBudget:
    """How many threads this process computes with: its part of the cores, while others compute on them.

    It also leaves one core to those who bring and verify the weights, until all are there: on a CPU both want every
    core, and where the computation takes them, the last layer comes so late that more is lost than won. A model whose
    weights are fewer than ``one_thread_bytes`` gets one core.
    """

    def __init__(
        self,
        num_weight_bytes: int,
        active_processes: ActiveProcesses | None = None,
        one_thread_bytes: int = MAX_ONE_THREAD_BYTES,
    ) -> None:
        self._active_processes = active_processes
        self._num_threads = torch.get_num_threads()
        self._max_threads = self._num_threads if num_weight_bytes >= one_thread_bytes else 1
        self._num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def adjust(self, is_loaded: bool) -> None:
        """Called on the computing thread before each layer, or those of one call; cheap while nothing changes."""
        wanted = self._max_threads
        if self._active_processes is not None:
            wanted = min(wanted, max(1, self._num_cores // self._active_processes.count_computing()))
        if not is_loaded:
            wanted = max(1, wanted - 1)
        self._set(wanted)

    def rest(self) -> None:
        """Nothing is left to compute: others may have all cores."""
        if self._active_processes is not None:
            self._active_processes.rest()

    def restore(self) -> None:
        """All threads again, for whoever computes next on this thread."""
        self.rest()
        self._set(self._num_threads)

    def _set(self, wanted: int) -> None:
        if wanted != torch.get_num_threads():
            torch.set_num_threads(wanted)
