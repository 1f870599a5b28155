"""The copy of a pack from its arena to a GPU, overlapped with the arrival of the rest of the pack.

The arena is a mapped file, not pinned: a GPU would read it through one small bounce buffer of the driver. Our own
threads copy it piece by piece into pinned buffers, which the GPU drains while the threads fill the next ones. Pinning
the arena takes longer than that copy; only memory that is already pinned is copied in place.

    submit --pieces--> threads: arena -> pinned buffer --link's stream--> device, then ``arrived`` and ``started``
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from torchrelay.common.errors import DataCorrupted
from torchrelay.common.host.machine import available_cores
from torchrelay.engine.weights.device_link import CopyEvent, DeviceLink

PIECE_BYTES: Final = 8 << 20
# A core copies about 10 GB/s, and a link to a GPU carries 25 to 55. The other half of the cores receives the pack.
NUM_THREADS: Final = max(1, min(8, available_cores() // 2))
_BUFFERS_PER_THREAD: Final = 2  # one is filled while the other is being copied


@dataclass(slots=True)
class _RangeCopy:
    """A range being copied."""

    begin: int
    num_bytes: int
    arrived: Callable[[Tensor], None]
    num_left: int
    target: Tensor | None = None  # on the device, taken for the first piece


class Stager:
    """Copies ranges of one source; its threads run from the first range until ``close``."""

    def __init__(
        self,
        source: Tensor,
        link: DeviceLink,
        fail: Callable[[str], None],
        started: Callable[[], None] = lambda: None,
        piece_bytes: int = PIECE_BYTES,
        num_threads: int = NUM_THREADS,
    ) -> None:
        """``started`` is called on one of the threads after each range, which may wait there for copies. ``fail`` is
        called there with the reason when no more copies will be made.
        """
        self._source, self._link, self._fail, self._started = source, link, fail, started
        self._piece_bytes = piece_bytes
        self._pieces: queue.SimpleQueue[tuple[_RangeCopy, int] | None] = queue.SimpleQueue()
        self._order = threading.Lock()  # the last copy of a range is started last
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()

    def submit(self, begin: int, num_bytes: int, arrived: Callable[[Tensor], None]) -> None:
        """(any thread) Copies ``num_bytes`` of the source from ``begin`` on to the device.

        ``arrived`` is called with the bytes there, in the order of the copies, once all of them have started: work that
        it starts on the device, and any thread that joins an event recorded in it, finds them complete.
        """
        self._start()
        offsets = range(0, max(num_bytes, 1), self._piece_bytes)
        copy = _RangeCopy(begin, num_bytes, arrived, len(offsets))
        for offset in offsets:
            self._pieces.put((copy, offset))

    def _start(self) -> None:
        with self._order:
            while not self._stopped.is_set() and len(self._threads) < self._num_threads:
                name = f"staging-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
                self._threads[-1].start()

    def close(self) -> None:
        """Ends the threads and releases the source; copies not started yet are dropped. Idempotent."""
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
        except (RuntimeError, MemoryError) as error:  # torch's, for anything that a device refuses
            self._fail(f"the copy to the device failed: {error}")

    def _send(self, pinned_buffers: _PinnedBuffers, copy: _RangeCopy, offset: int) -> None:
        begin, end = copy.begin + offset, copy.begin + min(offset + self._piece_bytes, copy.num_bytes)
        piece = self._source[begin:end]
        ready = piece if self._link.is_pinned(piece) else pinned_buffers.fill(piece)
        with self._order:
            if copy.target is None:  # here, because a device that is busy or full makes this slow
                copy.target = self._link.space(copy.num_bytes)
            self._link.copy(copy.target[offset : offset + len(piece)], ready)
            pinned_buffers.sent(self._link.event())
            copy.num_left -= 1
            if copy.num_left:
                return
            with self._link.ordered():
                copy.arrived(copy.target)
        self._started()


class _PinnedBuffers:
    """The buffers of one thread, used in rotation."""

    def __init__(self, link: DeviceLink, num_bytes: int) -> None:
        self._link, self._num_bytes = link, num_bytes
        self._buffers: list[Tensor] = []
        self._events: list[CopyEvent | None] = [None] * _BUFFERS_PER_THREAD
        self._turn = 0

    def fill(self, piece: Tensor) -> Tensor:
        """Copies the piece into the next buffer, once that is free."""
        if not self._buffers:  # not before they are needed: pinning takes milliseconds
            self._buffers = [self._link.pinned(self._num_bytes) for _ in range(_BUFFERS_PER_THREAD)]
        event = self._events[self._turn]
        if event is not None:
            event.wait()
        filled = self._buffers[self._turn][: len(piece)]
        np.copyto(filled.numpy(), piece.numpy())  # one memcpy without the GIL; torch would wake its thread pool
        return filled

    def sent(self, event: CopyEvent) -> None:
        """Marks the buffer filled last as in use until the event."""
        self._events[self._turn] = event
        self._turn = (self._turn + 1) % _BUFFERS_PER_THREAD

    def wait(self) -> None:
        """Waits until no buffer is in use."""
        for event in self._events:
            if event is not None:
                event.wait()
