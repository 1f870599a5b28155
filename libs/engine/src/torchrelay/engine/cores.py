"""How many cores a computation takes: fewer than all where that leaves room for what it waits for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
    """Leaves one core to those who bring and verify the weights, until all are there.

    On a CPU both want every core: where the computation takes them, the last layer comes so late that more is lost
    than won.
    """

    def __init__(self) -> None:
        self._num_threads = torch.get_num_threads()

    def settle(self, is_loaded: bool) -> None:
        """Called on the computing thread before each layer; costs nothing while nothing changes."""
        wanted = self._num_threads if is_loaded else max(1, self._num_threads - 1)
        if wanted != torch.get_num_threads():
            torch.set_num_threads(wanted)

    def restore(self) -> None:
        """All cores again, for whoever computes next on this thread."""
        self.settle(is_loaded=True)
