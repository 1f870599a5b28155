"""Frames over a connection: whole ones in and out, with an eye on the clock and on whoever wants to stop."""

from __future__ import annotations

import math
import threading
import time

from blake3 import blake3

from torchrelay.transfer.errors import ProtocolViolation, SourceClosed, SourceStalled
from torchrelay.transfer.transport import Connection
from torchrelay.transfer.wire import (
    HEADER_BYTES,
    MAX_REFUSAL_BYTES,
    FrameHeader,
    FrameKind,
    decode_refusal,
    pack_header,
    unpack_header,
)

RECEIVE_BYTES = 512 << 10  # what is hashed while it is still in the processor's cache


class Stopped(Exception):
    """The stop event was set."""


class FrameStream:
    """One end of a stream. ``stall_s`` is how long the other end may be silent; ``ends_at``, a monotonic time, is when
    everything must have been received, however busily it trickles in.
    """

    def __init__(
        self,
        connection: Connection,
        stall_s: float,
        stop: threading.Event | None = None,
        ends_at: float = math.inf,
    ) -> None:
        self._connection = connection
        self._stall_s = stall_s
        self._stop = stop
        self._ends_at = ends_at
        self._header = memoryview(bytearray(HEADER_BYTES))

    def send(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Sends a small frame."""
        self._connection.send((pack_header(kind, len(payload)), payload))

    def receive_header(self, starve_s: float = math.inf) -> FrameHeader:
        """The next frame's header; keep-alive frames are passed over, for at most ``starve_s``.

        Raises ``SourceClosed``, ``SourceStalled``, ``ProtocolViolation``, ``Stopped``, and what the other end gives
        as its reason when it refuses.
        """
        begin = time.monotonic()
        while True:
            self.fill(self._header)
            header = unpack_header(self._header)
            if header.kind == FrameKind.REFUSED:
                raise decode_refusal(self._payload(header, MAX_REFUSAL_BYTES)).error()
            if header.kind != FrameKind.ALIVE:
                return header
            self._payload(header, 0)
            if time.monotonic() - begin > starve_s:
                raise SourceStalled(f"the source lives, and has had nothing to send for {starve_s:g} s")

    def receive(self, kind: FrameKind, limit_bytes: int) -> bytes:
        """The payload of the next frame, which must be of this kind and no longer than the limit."""
        header = self.receive_header()
        if header.kind != kind:
            raise ProtocolViolation(f"a {header.kind.name} frame came where {kind.name} was due")
        return self._payload(header, limit_bytes)

    def fill(self, view: memoryview, digest: blake3 | None = None) -> None:
        """Receives exactly the view's bytes, in place; ``digest`` takes them in as they come."""
        heard, done = time.monotonic(), 0
        while done < len(view):
            if self._stop is not None and self._stop.is_set():
                raise Stopped
            if time.monotonic() > self._ends_at:
                raise SourceStalled("what was due took too long")
            try:
                num_bytes = self._connection.receive_into(view[done : done + RECEIVE_BYTES])
            except TimeoutError:
                if time.monotonic() - heard > self._stall_s:
                    raise SourceStalled(f"nothing was received for {self._stall_s:g} s") from None
                continue
            if num_bytes == 0:
                raise SourceClosed("the connection ended early")
            if digest is not None:
                digest.update(view[done : done + num_bytes])
            heard, done = time.monotonic(), done + num_bytes

    def close(self) -> None:
        self._connection.close()

    def _payload(self, header: FrameHeader, limit_bytes: int) -> bytes:
        if header.num_bytes > limit_bytes:
            raise ProtocolViolation(
                f"a {header.kind.name} frame of {header.num_bytes} bytes, not at most {limit_bytes}"
            )
        payload = bytearray(header.num_bytes)
        self.fill(memoryview(payload))
        return bytes(payload)
