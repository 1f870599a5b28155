"""The copy of a pack from its arena to a GPU, overlapped with the arrival of what is not there yet.

The arena is a mapped file, not pinned: a GPU would read it through one small bounce buffer of the driver. Threads of
our own copy it piece by piece into pinned buffers, from which the GPU takes it while they fill the next ones. Pinning
the arena itself takes longer than that copy, so it pays only where somebody else has done it before: memory that is
found pinned is copied from where it lies.

    submit --pieces--> threads: arena -> pinned buffer --link's stream--> device, then ``arrived``
"""

from __future__ import annotations

import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from torchrelay.common.errors import DataCorrupted

PIECE_BYTES: Final = 8 << 20
# One core copies about 10 GB/s, a link to a GPU carries 25 to 55; the other half of the cores brings the bytes.
NUM_THREADS: Final = max(1, min(8, (os.cpu_count() or 1) // 2))
_BUFFERS_PER_THREAD: Final = 2  # one is filled while the other is on its way


class CopyEvent(ABC):
    """A place in the order of a link's copies."""

    @abstractmethod
    def wait(self) -> None:
        """(any thread) Returns once everything before it is over."""

    @abstractmethod
    def join(self) -> None:
        """(computing thread) What this thread gives the device from now on begins after it; returns at once."""


class DeviceLink(ABC):
    """Copies to one device, one after the other, beside its computations. Methods from any thread."""

    @abstractmethod
    def pinned(self, num_bytes: int) -> Tensor:
        """uint8 memory that copies run from by themselves."""

    @abstractmethod
    def is_pinned(self, memory: Tensor) -> bool:
        """Whether copies run from this memory by themselves."""

    @abstractmethod
    def space(self, num_bytes: int) -> Tensor:
        """uint8 memory of the device; copies begin after whatever computes with it until now."""

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor) -> None:
        """Starts a copy from pinned memory, which must stay as it is until a later mark has passed."""

    @abstractmethod
    def event(self) -> CopyEvent:
        """The place after everything started so far."""

    @abstractmethod
    def ordered(self) -> AbstractContextManager[Any]:
        """Computations that this thread starts inside take their place in the order of the copies."""


class CudaCopyEvent(CopyEvent):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event: torch.cuda.Event = stream.record_event()
        self._device = stream.device

    def wait(self) -> None:
        self._event.synchronize()

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class CudaLink(DeviceLink):
    """A stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def is_pinned(self, memory: Tensor) -> bool:
        return memory.is_pinned()

    def space(self, num_bytes: int) -> Tensor:
        # The allocator gives out again what a step under way has let go of: its computations, one after the other, are
        # over by then, but a stream of its own would write amid them.
        device = self._stream.device
        space = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return space

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def event(self) -> CopyEvent:
        return CudaCopyEvent(self._stream)

    def ordered(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def register(self, memory: Tensor) -> bool:
        """Pins memory where it lies, until ``unregister``; its mapping must be writable.

        False where the system does not let us.
        """
        found = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)  # type: ignore[no-untyped-call]
        return int(found) == 0

    def unregister(self, memory: Tensor) -> None:
        """The memory must be as it was registered, and no copy from it under way."""
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]


def link_to(device: torch.device) -> DeviceLink | None:
    """A link to a device; None: it computes where the arena lies."""
    return CudaLink(device) if device.type == "cuda" else None


@dataclass(slots=True)
class _RangeCopy:
    """One range on its way."""

    begin: int
    target: Tensor
    arrived: Callable[[], None]
    num_left: int


class Stager:
    """Copies ranges of one source; its threads run from the first one until ``close``."""

    def __init__(
        self,
        source: Tensor,
        link: DeviceLink,
        fail: Callable[[str], None],
        piece_bytes: int = PIECE_BYTES,
        num_threads: int = NUM_THREADS,
    ) -> None:
        """``fail`` is told, on one of the threads, why nothing more will come."""
        self._source, self._link, self._fail = source, link, fail
        self._piece_bytes = piece_bytes
        self._pieces: queue.SimpleQueue[tuple[_RangeCopy, int] | None] = queue.SimpleQueue()
        self._order = threading.Lock()  # a transfer's last copy is started last
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()

    def submit(self, begin: int, target: Tensor, arrived: Callable[[], None]) -> None:
        """(any thread) Copies the source from ``begin`` on into all of ``target``, uint8 on the device.

        ``arrived`` is called when that is on its way, in the order of the copies: what it starts on the device, and
        whoever joins a mark that it takes, finds the bytes there.
        """
        self._start()
        offsets = range(0, max(len(target), 1), self._piece_bytes)
        transfer = _RangeCopy(begin, target, arrived, len(offsets))
        for offset in offsets:
            self._pieces.put((transfer, offset))

    def _start(self) -> None:
        with self._order:
            while not self._stopped.is_set() and len(self._threads) < self._num_threads:
                name = f"staging-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
                self._threads[-1].start()

    def close(self) -> None:
        """Ends the threads and lets go of the source; what is not on its way yet never will be. Idempotent."""
        with self._order:
            self._stopped.set()
        for _ in self._threads:
            self._pieces.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._link.event().wait()
        self._source = torch.empty(0, dtype=torch.uint8)

    def _run(self) -> None:
        try:
            pinned_buffers = _PinnedBuffers(self._link, self._piece_bytes)
            while (piece := self._pieces.get()) is not None and not self._stopped.is_set():
                self._send(pinned_buffers, *piece)
            pinned_buffers.wait()
        except DataCorrupted as error:
            self._fail(error.message)
        except (RuntimeError, MemoryError) as error:  # torch's, for everything that a device refuses
            self._fail(f"the copy to the device failed: {error}")

    def _send(self, pinned_buffers: _PinnedBuffers, transfer: _RangeCopy, offset: int) -> None:
        target = transfer.target[offset : offset + self._piece_bytes]
        begin = transfer.begin + offset
        piece = self._source[begin : begin + len(target)]
        ready = piece if self._link.is_pinned(piece) else pinned_buffers.fill(piece)
        with self._order:
            self._link.copy(target, ready)
            pinned_buffers.sent(self._link.event())
            transfer.num_left -= 1
            if not transfer.num_left:
                with self._link.ordered():
                    transfer.arrived()


class _PinnedBuffers:
    """One thread's buffers, taken in turn."""

    def __init__(self, link: DeviceLink, num_bytes: int) -> None:
        self._link, self._num_bytes = link, num_bytes
        self._buffers: list[Tensor] = []
        self._events: list[CopyEvent | None] = [None] * _BUFFERS_PER_THREAD
        self._turn = 0

    def fill(self, piece: Tensor) -> Tensor:
        """A copy of the piece in the next buffer; waits until that is free."""
        if not self._buffers:  # not before it is known that they are needed: pinning them takes milliseconds
            self._buffers = [self._link.pinned(self._num_bytes) for _ in range(_BUFFERS_PER_THREAD)]
        event = self._events[self._turn]
        if event is not None:
            event.wait()
        filled = self._buffers[self._turn][: len(piece)]
        np.copyto(filled.numpy(), piece.numpy())  # one memcpy without the interpreter's lock; torch would wake a team
        return filled

    def sent(self, event: CopyEvent) -> None:
        """What was filled last is on its way until the mark."""
        self._events[self._turn] = event
        self._turn = (self._turn + 1) % _BUFFERS_PER_THREAD

    def wait(self) -> None:
        """Until no buffer is on its way any more."""
        for event in self._events:
            if event is not None:
                event.wait()
