"""Copies between the host and one device, in order, beside its computations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from torchrelay.engine.device_counts import CopyTimes


class CopyEvent(ABC):
    """A position in the order of a link's copies."""

    @abstractmethod
    def wait(self) -> None:
        """(any thread) Returns once everything before this position has completed."""

    @abstractmethod
    def join(self) -> None:
        """(computing thread) Delays everything that this thread launches from now on until this position; returns at
        once.
        """


class DeviceLink(ABC):
    """Copies to or from one device, in order, beside its computations. Methods may be called on any thread."""

    @abstractmethod
    def pinned(self, num_bytes: int) -> Tensor:
        """uint8 host memory that the device copies from and to asynchronously."""

    @abstractmethod
    def is_pinned(self, memory: Tensor) -> bool:
        """Whether the device copies from this memory asynchronously."""

    @abstractmethod
    def space(self, num_bytes: int) -> Tensor:
        """uint8 device memory; copies into it begin after the current computations with it."""

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor) -> None:
        """Starts a copy from or to pinned memory; neither side may be reused until a later event has passed."""

    @abstractmethod
    def follow(self) -> None:
        """Starts the copies to come after all that this thread has launched."""

    @abstractmethod
    def event(self) -> CopyEvent:
        """The position after all copies started so far."""

    @abstractmethod
    def ordered(self) -> AbstractContextManager[Any]:
        """A context in which this thread's computations run in the order of the copies."""


class CudaCopyEvent(CopyEvent):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event: torch.cuda.Event = stream.record_event()
        self._device = stream.device

    def wait(self) -> None:
        self._event.synchronize()

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class CudaLink(DeviceLink):
    """Copies on a stream of its own."""

    def __init__(self, device: torch.device, kind: str = "weights") -> None:
        """``kind`` names the copies in ``device_counts``."""
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._times = CopyTimes(kind)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def is_pinned(self, memory: Tensor) -> bool:
        return memory.is_pinned()

    def space(self, num_bytes: int) -> Tensor:
        # The allocator reuses memory that the running step has freed. Work on the step's own stream is ordered after
        # the step; this stream must wait.
        space = torch.empty(num_bytes, dtype=torch.uint8, device=self._stream.device)
        self.follow()
        return space

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def copy(self, target: Tensor, source: Tensor) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
        self._times.add(begin, end, source.nbytes)

    def event(self) -> CopyEvent:
        return CudaCopyEvent(self._stream)

    def ordered(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)


def link_to(device: torch.device, kind: str = "weights") -> DeviceLink | None:
    """A link to a device. None for a CPU, which computes in the arena itself."""
    return CudaLink(device, kind) if device.type == "cuda" else None
