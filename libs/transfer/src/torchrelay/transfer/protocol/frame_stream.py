"""Frames over a connection: whole ones in and out, with an eye on the clock and on whoever wants to stop."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from blake3 import blake3

from torchrelay.transfer.errors import ProtocolViolation, SourceClosed, SourceStalled
from torchrelay.transfer.protocol.frames import (
    HEADER_BYTES,
    MAX_REFUSAL_BYTES,
    FrameHeader,
    FrameKind,
    decode_refusal,
    pack_header,
    unpack_header,
)
from torchrelay.transfer.transport.interface import Connection

RECEIVE_BYTES = 512 << 10  # what is hashed while it is still in the processor's cache
SKIP_BYTES = 64 << 10


class StopRequested(Exception):
    """The stop event was set."""


class ChunkRevoked(Exception):
    """The chunk that is coming in is no longer wanted of this source."""


class FrameStream:
    """One end of a stream. ``stall_s`` is how long the other end may be silent; ``ends_at``, a monotonic time, is when
    everything must have been received, however busily it trickles in.

    One thread receives. ``send`` may be called by any. ``watch`` is told of each few bytes of a chunk, and, by 0, about
    every ``TICK_S`` in which nothing comes; what it raises ends the wait.
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
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._sending = threading.Lock()
        self._ending = threading.Lock()
        self._closed = False
        self.watch: Callable[[int], None] = _ignore_progress

    def send(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Sends a small frame."""
        with self._sending:
            self._connection.send((pack_header(kind, len(payload)), payload))

    def receive_header(self) -> FrameHeader:
        """The next frame's header.

        Raises ``SourceClosed``, ``SourceStalled``, ``ProtocolViolation``, ``Stopped``, and what the other end gives
        as its reason when it refuses.
        """
        self.receive_exactly(self._header)
        header = unpack_header(self._header)
        if header.kind == FrameKind.REFUSED:
            raise decode_refusal(self.payload(header, MAX_REFUSAL_BYTES)).error()
        return header

    def receive(self, kind: FrameKind, limit_bytes: int) -> bytes:
        """The payload of the next frame, which must be of this kind and no longer than the limit; keep-alive frames
        are passed over.
        """
        header = self.receive_header()
        while header.kind == FrameKind.ALIVE and kind != FrameKind.ALIVE:
            self.payload(header, 0)
            header = self.receive_header()
        if header.kind != kind:
            raise ProtocolViolation(f"a {header.kind.name} frame came where {kind.name} was due")
        return self.payload(header, limit_bytes)

    def receive_exactly(self, view: memoryview) -> None:
        """Receives exactly the view's bytes, in place."""
        done = 0
        while done < len(view):
            done += self.receive_some(view[done:])

    def receive_hashed(self, view: memoryview, digest: blake3) -> bool:
        """Receives exactly the view's bytes, in place; ``digest`` takes them in as they come.

        Once ``watch`` raises ``LetGo`` the view is touched no more; what is left is passed over, and False returned.
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
        """Receives so many bytes, for nobody."""
        scratch = memoryview(bytearray(min(num_bytes, SKIP_BYTES)))
        while num_bytes:
            passed = self.receive_some(scratch[:num_bytes])
            num_bytes -= passed
            self.watch(passed)

    def receive_some(self, view: memoryview) -> int:
        """Receives at least a byte, and at most the view's."""
        last_received = time.monotonic()
        while True:
            if self._stop is not None and self._stop.is_set():
                raise StopRequested
            if time.monotonic() > self._ends_at:
                raise SourceStalled("what was due took too long")
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
        """Ends both directions. Any thread may, at any time."""
        with self._ending:
            if not self._closed:
                self._connection.abort()

    def close(self) -> None:
        """By the thread that receives. The descriptors, whose numbers others get next, go when no thread sends."""
        self.abort()
        with self._sending, self._ending:
            self._closed = True
            self._connection.close()

    def payload(self, header: FrameHeader, limit_bytes: int) -> bytes:
        """What follows a header."""
        if header.num_bytes > limit_bytes:
            raise ProtocolViolation(
                f"a {header.kind.name} frame of {header.num_bytes} bytes, not at most {limit_bytes}"
            )
        payload = bytearray(header.num_bytes)
        self.receive_exactly(memoryview(payload))
        return bytes(payload)


def _ignore_progress(num_bytes: int) -> None:
    """Nobody looks."""
