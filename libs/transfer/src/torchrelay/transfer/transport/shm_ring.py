"""A direction of a shared-memory connection: a ring of bytes in a memfd, and a socket that carries byte counts.

The sender writes into the ring and sends the number of bytes; the receiver reads them and returns counts as credits
in batches. There are no shared counters: a received count is permission to read or write, a dying peer closes the
socket, and waiting means waiting for a message. The ring is read and written as a file, not mapped: the copies run
without the interpreter's lock, and a peer cannot cause a fault by truncating the memory.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

from torchrelay.transfer.transport import sockets
from torchrelay.transfer.transport.interface import TICK_S
from torchrelay.transfer.transport.iovec import drop_prefix, nonempty_views, take_prefix

RING_BYTES = 1 << 20  # stays in the processor's cache
PIECE_BYTES = RING_BYTES // 4  # the receiver reads one piece while the sender writes the next
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_NO_RING = -1
_MAX_PARTS = 1024  # IOV_MAX
_COUNT = struct.Struct("=I")
_COUNTS_BYTES = 64 * _COUNT.size


def make_ring() -> int:
    """A memfd of ``RING_BYTES`` that cannot shrink; its pages are allocated on first write."""
    ring = os.memfd_create("torchrelay-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(ring, RING_BYTES)
    fcntl.fcntl(ring, fcntl.F_ADD_SEALS, _SEALS)
    return ring


def check_ring(ring: int) -> None:
    """Raises ``ConnectionError`` unless the ring has the size and seals of ``make_ring``."""
    try:
        seals = fcntl.fcntl(ring, fcntl.F_GET_SEALS)
    except OSError as error:  # not a memfd
        raise ConnectionError(f"the peer's ring cannot be used: {error}") from error
    if seals & _SEALS != _SEALS or os.fstat(ring).st_size != RING_BYTES:
        raise ConnectionError("the peer's ring has the wrong size or is not sealed")


class _RingEnd:
    """Owns a ring and the socket for its counts."""

    def __init__(self, counts: socket.socket, ring: int) -> None:
        self._counts, self._ring = counts, ring

    def shutdown(self) -> None:
        sockets.shut_down(self._counts)

    def close(self) -> None:
        self._counts.close()
        if self._ring != _NO_RING:
            os.close(self._ring)
            self._ring = _NO_RING


class RingWriter(_RingEnd):
    """The sender's end."""

    def __init__(self, counts: socket.socket, ring: int, send_timeout_s: float) -> None:
        sockets.set_timeouts(counts, receive_s=send_timeout_s, send_s=send_timeout_s)
        super().__init__(counts, ring)
        self._send_timeout_s = send_timeout_s
        self._at, self._num_free = 0, RING_BYTES

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        pending = nonempty_views(parts)
        try:
            while pending:
                if not self._num_free:
                    self._wait_free()
                piece = take_prefix(pending, min(self._num_free, RING_BYTES - self._at, PIECE_BYTES))
                num_bytes = os.pwritev(self._ring, piece[:_MAX_PARTS], self._at)
                self._at = (self._at + num_bytes) % RING_BYTES
                self._num_free -= num_bytes
                self._counts.send(_COUNT.pack(num_bytes))
                drop_prefix(pending, num_bytes)
        except BlockingIOError as error:
            raise TimeoutError(f"the peer accepted nothing for {self._send_timeout_s:g} s") from error

    def _wait_free(self) -> None:
        num_credits = _receive_counts(self._counts)
        if not num_credits:
            raise BrokenPipeError("the peer is gone")
        self._num_free += num_credits
        if self._num_free > RING_BYTES:
            raise ConnectionError("the peer returned more credits than it had")


class RingReader(_RingEnd):
    """The receiver's end."""

    def __init__(self, counts: socket.socket, ring: int, send_timeout_s: float) -> None:
        sockets.set_timeouts(counts, receive_s=TICK_S, send_s=send_timeout_s)
        super().__init__(counts, ring)
        self._at, self._num_ready, self._num_owed = 0, 0, 0

    def receive_into(self, view: memoryview) -> int:
        if not self._num_ready:
            try:
                self._num_ready = _receive_counts(self._counts)
            except BlockingIOError as error:
                raise TimeoutError("nothing received") from error
            except ConnectionResetError:  # the peer is gone and had not read its credits
                return 0
            if self._num_ready > RING_BYTES - self._num_owed:
                raise ConnectionError("the peer sent more than the ring holds")
            if not self._num_ready:
                return 0
        wanted = view[: min(self._num_ready, RING_BYTES - self._at)]
        num_bytes = os.preadv(self._ring, [wanted], self._at)
        self._at = (self._at + num_bytes) % RING_BYTES
        self._num_ready -= num_bytes
        self._return_credits(num_bytes)
        return num_bytes

    def _return_credits(self, num_bytes: int) -> None:
        self._num_owed += num_bytes
        if self._num_owed >= PIECE_BYTES:  # always reached, since a waiting sender has filled the ring
            with suppress(BrokenPipeError, ConnectionResetError):  # the peer is gone; its bytes can still be read
                self._counts.send(_COUNT.pack(self._num_owed))
            self._num_owed = 0

    def peer_closed(self) -> bool:
        if self._num_ready:
            return False
        try:
            return sockets.peer_closed(self._counts)
        except ConnectionResetError:
            return True


def _receive_counts(counts: socket.socket) -> int:
    """The sum of the counts received; 0: the peer has closed. Raises ``BlockingIOError``."""
    packed = counts.recv(_COUNTS_BYTES)
    if len(packed) % _COUNT.size:
        raise ConnectionError("the peer sent a truncated count")
    return sum(count for (count,) in _COUNT.iter_unpack(packed))
