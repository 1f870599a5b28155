"""Whole frames over a connection, with time limits and a stop event."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from blake3 import blake3

from torchrelay.transfer.errors import ProtocolViolation, SourceClosed, SourceStalled
from torchrelay.transfer.protocol import frames
from torchrelay.transfer.protocol.frames import FrameHeader, FrameKind
from torchrelay.transfer.transport.interface import Connection

RECEIVE_BYTES = 512 << 10  # hashed while still in the processor's cache
SKIP_BYTES = 64 << 10


class StopRequested(Exception):
    """The stop event was set."""


class ChunkRevoked(Exception):
    """The chunk being received is no longer wanted from this source."""


class FrameStream:
    """An end of a stream. ``stall_s`` limits the peer's silence; ``ends_at``, a monotonic time, limits all receives,
    even while bytes keep trickling in.

    One thread receives; any thread may ``send``. ``watch`` is called with the number of bytes of each received part of
    a chunk, and with 0 about every ``TICK_S`` in which nothing arrives; an exception from it ends the receive.
    """

    def __init__(
        self,
        connection: Connection,
        stall_s: float,
        stop: threading.Event | None = None,
        ends_at: float = math.inf,
    ) -> None:
        self._connection = connection
        self.stall_s = stall_s
        self._stop = stop
        self._ends_at = ends_at
        self._header = memoryview(bytearray(frames.HEADER_BYTES))
        self._sending = threading.Lock()
        self._ending = threading.Lock()
        self._closed = False
        self.watch: Callable[[int], None] = lambda num_bytes: None

    def send(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Sends a small frame."""
        with self._sending:
            self._connection.send((frames.pack_header(kind, len(payload)), payload))

    def receive_header(self) -> FrameHeader:
        """The next frame's header.

        Raises ``SourceClosed``, ``SourceStalled``, ``ProtocolViolation``, ``StopRequested``, and the peer's refusal.
        """
        self.receive_exactly(self._header)
        header = frames.unpack_header(self._header)
        if header.kind == FrameKind.REFUSED:
            raise frames.decode(self.payload(header, frames.MAX_REFUSAL_BYTES), frames.Refusal).error()
        return header

    def receive(self, kind: FrameKind, limit_bytes: int) -> bytes:
        """The payload of the next frame, which must have this kind and at most this length. Skips keep-alives."""
        header = self.receive_header()
        while header.kind == FrameKind.ALIVE and kind != FrameKind.ALIVE:
            self.payload(header, 0)
            header = self.receive_header()
        if header.kind != kind:
            raise ProtocolViolation(f"unexpected {header.kind.name} frame instead of {kind.name}")
        return self.payload(header, limit_bytes)

    def receive_exactly(self, view: memoryview) -> None:
        """Receives exactly the view's bytes, in place."""
        done = 0
        while done < len(view):
            done += self.receive_some(view[done:])

    def receive_hashed(self, view: memoryview, digest: blake3) -> bool:
        """Receives exactly the view's bytes, in place, and updates ``digest`` as they arrive.

        When ``watch`` raises ``ChunkRevoked``, skips the rest without writing to the view and returns False.
        """
        done = 0
        try:
            while done < len(view):
                num_bytes = self.receive_some(view[done : done + RECEIVE_BYTES])
                digest.update(view[done : done + num_bytes])
                done += num_bytes
                self.watch(num_bytes)
        except ChunkRevoked:
            self.skip(len(view) - done)
            return False
        return True

    def skip(self, num_bytes: int) -> None:
        """Receives and discards this many bytes."""
        scratch = memoryview(bytearray(min(num_bytes, SKIP_BYTES)))
        while num_bytes:
            num_received = self.receive_some(scratch[:num_bytes])
            num_bytes -= num_received
            self.watch(num_received)

    def receive_some(self, view: memoryview) -> int:
        """Receives at least one byte, at most the view's length."""
        last_received = time.monotonic()
        while True:
            if self._stop is not None and self._stop.is_set():
                raise StopRequested
            if time.monotonic() > self._ends_at:
                raise SourceStalled("the peer did not finish in time")
            try:
                num_bytes = self._connection.receive_into(view)
            except TimeoutError:
                if time.monotonic() - last_received > self.stall_s:
                    raise SourceStalled(f"nothing was received for {self.stall_s:g} s") from None
                self.watch(0)
                continue
            if num_bytes == 0:
                raise SourceClosed("the connection ended early")
            return num_bytes

    def abort(self) -> None:
        """Ends both directions, from any thread, at any time."""
        with self._ending:
            if not self._closed:
                self._connection.abort()

    def close(self) -> None:
        """Closes the connection; call it in the receiving thread.

        Waits for senders first: the number of a closed descriptor may be reused at once.
        """
        self.abort()
        with self._sending, self._ending:
            self._closed = True
            self._connection.close()

    def payload(self, header: FrameHeader, limit_bytes: int) -> bytes:
        """The bytes that follow a header."""
        if header.num_bytes > limit_bytes:
            raise ProtocolViolation(
                f"{header.kind.name} frame has {header.num_bytes} bytes; at most {limit_bytes} are allowed"
            )
        payload = bytearray(header.num_bytes)
        self.receive_exactly(memoryview(payload))
        return bytes(payload)
