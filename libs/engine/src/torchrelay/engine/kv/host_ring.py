"""Copies of KV between a device and the host, beside the device's computations. Never run on a GPU.

pages --gathered on the device--> ring --deliver--> the worker's buffers
a received chunk --> ring --> device --scattered there--> pages
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from torchrelay.engine.buffers import as_bytes, as_tensor
from torchrelay.engine.weights.device_link import CopyEvent, DeviceLink

RING_BYTES: Final = 64 << 20
_MAX_COPIES: Final = 64


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy from or to [begin, end) of the ring that may still run."""

    begin: int
    end: int
    event: CopyEvent
    source: Tensor | None = None  # on the device; its memory is reused once nothing refers to it
    deliver: Callable[[memoryview], None] | None = None


class HostRing:
    """Pinned memory for the copies of one direction. It is taken at the first copy, and again for a larger one.

    Without a ``link`` the device is the host: nothing is copied. All methods run on the engine thread.
    """

    def __init__(self, link: DeviceLink | None, num_bytes: int = RING_BYTES) -> None:
        self._link, self._num_bytes = link, num_bytes
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._end = 0  # of the range that was taken last
        self._copies: deque[_Copy] = deque()  # in their order

    def upload(self, data: memoryview) -> Tensor:
        """The bytes on the device, uint8, complete for all that this thread launches from now on. Do not write them."""
        if (link := self._link) is None:
            return as_tensor(data)
        begin = self._take(link, len(data))
        staged = self._memory[begin : self._end]
        np.copyto(staged.numpy(), np.frombuffer(data, np.uint8))
        target = link.space(len(data))
        link.copy(target, staged)
        event = link.event()
        event.join()
        self._copies.append(_Copy(begin, self._end, event))
        return target

    def download(self, tensor: Tensor, deliver: Callable[[memoryview], None]) -> None:
        """Calls ``deliver`` with the tensor's bytes, valid during that call, in a later call of a method if not now.

        Deliveries are in the order of the calls.
        """
        if (link := self._link) is None:
            deliver(as_bytes(tensor))
            return
        source = tensor.contiguous().view(torch.uint8).reshape(-1)
        begin = self._take(link, len(source))
        link.follow()
        link.copy(self._memory[begin : self._end], source)
        self._copies.append(_Copy(begin, self._end, link.event(), source, deliver))

    def finish(self) -> None:
        """Waits for all copies, the oldest first, and delivers each."""
        while self._copies:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        copy = self._copies.popleft()
        copy.event.wait()
        if copy.deliver is not None:
            copy.deliver(self._memory[copy.begin : copy.end].numpy().data)

    def _take(self, link: DeviceLink, num_bytes: int) -> int:
        """The begin of the next range, once the copies there are over; its end is ``_end``."""
        if num_bytes > len(self._memory):
            self.finish()
            with torch.inference_mode(False):  # an inference tensor could not be written outside that mode
                self._memory, self._end = link.pinned(max(num_bytes, self._num_bytes)), 0
        begin = self._end if self._end + num_bytes <= len(self._memory) else 0
        end = begin + num_bytes
        while len(self._copies) == _MAX_COPIES or any(each.begin < end and begin < each.end for each in self._copies):
            self._finish_oldest()
        self._end = end
        return begin
