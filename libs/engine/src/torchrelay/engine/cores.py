"""How many cores a computation takes: fewer than all where that leaves room for what it waits for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from torchrelay.engine.neighbours import Neighbours

# Of weights. A step of fewer takes about as long on one core; on two, while another program ran beside, each wait for a
# thread that was off its core took milliseconds, and an answer 5 s instead of 0.1.
ONE_CORE_BYTES: Final = 16 << 20


@contextmanager
def one_core() -> Iterator[None]:
    """On this thread: for small work, after which a second core would spin for as long as it helped."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class CoreShare:
    """How many threads this process computes with: its part of the cores, while others compute on them.

    It also leaves one core to those who bring and verify the weights, until all are there: on a CPU both want every
    core, and where the computation takes them, the last layer comes so late that more is lost than won. A model whose
    weights are fewer than ``ONE_CORE_BYTES`` gets one core.
    """

    def __init__(self, num_weight_bytes: int, neighbours: Neighbours | None = None) -> None:
        self._neighbours = neighbours
        self._num_threads = torch.get_num_threads()
        self._most = self._num_threads if num_weight_bytes >= ONE_CORE_BYTES else 1
        self._num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def settle(self, is_loaded: bool) -> None:
        """Called on the computing thread before each layer, or those of one call; cheap while nothing changes."""
        wanted = self._most
        if self._neighbours is not None:
            wanted = min(wanted, max(1, self._num_cores // self._neighbours.count_computing()))
        if not is_loaded:
            wanted = max(1, wanted - 1)
        self._set(wanted)

    def rest(self) -> None:
        """Nothing is left to compute: others may have all cores."""
        if self._neighbours is not None:
            self._neighbours.rest()

    def restore(self) -> None:
        """All threads again, for whoever computes next on this thread."""
        self.rest()
        self._set(self._num_threads)

    def _set(self, wanted: int) -> None:
        if wanted != torch.get_num_threads():
            torch.set_num_threads(wanted)
