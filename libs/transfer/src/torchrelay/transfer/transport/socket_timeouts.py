"""Time limits of a blocking socket, kept by the kernel: none costs a poll before each call."""

from __future__ import annotations

import socket
import struct


def set_timeouts(blocking: socket.socket, receive_s: float, send_s: float) -> None:
    """A receive or send that takes longer raises ``BlockingIOError``, without a select call before each."""
    blocking.setblocking(True)
    blocking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(receive_s))
    blocking.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_s))


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))
