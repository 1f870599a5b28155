"""Closes a connection whose client is still sending a body that the gateway does not read.

Closing a socket with unread bytes resets the connection, and many clients lose the answer by that. So the gateway sends
the answer, ends its side of the stream, and discards what still arrives, up to a time and a number of bytes.
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
        self._left: dict[socket.socket, int] = {}  # bytes that may still be discarded

    def begin(self, transport: asyncio.Transport, max_bytes: int) -> None:
        """Keeps the socket of ``transport``, which is closing and has sent everything, open for what still arrives."""
        if len(self._left) >= MAX_LINGERING:
            return
        try:
            lingering = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        except OSError:  # no descriptor is free: this connection is reset too
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
