"""Memory that a thread computes in, again and again."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class Workspace(threading.local):
    """Each thread has its own. Kept: memory taken anew for each use would be faulted in each time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def of(self, count: int) -> Tensor:
        """``count`` numbers in fp32, until the thread's next call."""
        if count > self._memory.shape[0]:
            with torch.inference_mode(False):  # else it could be written to in that mode alone
                self._memory = torch.empty(count)
        return self._memory[:count]
