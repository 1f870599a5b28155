"""Scratch memory of a thread, reused from call to call."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class Workspace(threading.local):
    """A buffer per thread. It is kept, because memory allocated per use would be faulted in each time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def of(self, count: int) -> Tensor:
        """``count`` fp32 numbers, valid until the thread's next call."""
        if count > self._memory.shape[0]:
            with torch.inference_mode(False):  # an inference tensor could not be written outside that mode
                self._memory = torch.empty(count)
        return self._memory[:count]
