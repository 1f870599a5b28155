"""The end of a connection whose client is still sending a body that nobody reads.

Closing a socket with unread bytes resets the connection, and many clients lose the answer by that. So the answer is
followed by the end of our stream, and what still arrives is thrown away, for a short time and up to a number of bytes.
"""

from __future__ import annotations

import asyncio
import os
import socket

LINGER_S = 2.0
MAX_LINGERING = 64  # at once; beyond that, connections are reset
_READ_BYTES = 64 << 10


class LingeringSockets:
    """The lingering connections of one server."""

    def __init__(self) -> None:
        self._left: dict[socket.socket, int] = {}  # bytes still to be thrown away

    def begin(self, transport: asyncio.Transport, max_bytes: int) -> None:
        """Called while ``transport`` closes and its socket is still open, with everything written to it sent."""
        if len(self._left) >= MAX_LINGERING:
            return
        try:
            lingering = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        except OSError:  # the process has no descriptor left: this connection is reset too
            return
        try:
            lingering.shutdown(socket.SHUT_WR)
        except OSError:  # the client has left
            lingering.close()
            return
        loop = asyncio.get_running_loop()
        self._left[lingering] = max_bytes
        loop.add_reader(lingering, self._discard, lingering)
        loop.call_later(LINGER_S, self._end, lingering)

    def _discard(self, lingering: socket.socket) -> None:
        try:
            num_bytes = len(lingering.recv(_READ_BYTES))
        except BlockingIOError:
            return
        except OSError:
            num_bytes = 0
        self._left[lingering] -= num_bytes
        if num_bytes == 0 or self._left[lingering] < 0:
            self._end(lingering)

    def _end(self, lingering: socket.socket) -> None:
        if self._left.pop(lingering, None) is not None:
            asyncio.get_running_loop().remove_reader(lingering)
            lingering.close()

    def end_all(self) -> None:
        for lingering in list(self._left):
            self._end(lingering)
