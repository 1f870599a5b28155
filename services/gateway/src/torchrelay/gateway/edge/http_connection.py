"""A REST connection as the event loop sees it. It costs little until its first byte."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from torchrelay.common.host.addresses import client_network
from torchrelay.gateway.edge.http_protocol import LAST_REQUEST_S, BoundedProtocol, Edge
from torchrelay.gateway.edge.turns import ClientGroup

_FIRST_READ_BYTES, _HEAD_READ_BYTES, _BODY_READ_BYTES = 4 << 10, 16 << 10, 64 << 10
_AUTHORIZATION = re.compile(rb"\r\nauthorization:([^\r\n]{1,512})\r\n", re.IGNORECASE)  # one way to match: linear time
_BUFFER = memoryview(bytearray(_BODY_READ_BYTES))  # shared by all connections: bytes are parsed before the next read


class Connection(asyncio.BufferedProtocol):
    """Reads into one small buffer: otherwise the event loop takes up to 256 KB at once from each connection.

    It reads the first bytes, and leaves the rest to the kernel until the connection has its turn to be parsed.
    """

    def __init__(self, edge: Edge, **protocol_args: Any) -> None:
        """``protocol_args``: the arguments with which uvicorn makes its protocols."""
        self._edge = edge
        self._connections: set[Any] = protocol_args["server_state"].connections
        self._make_protocol: Callable[[], BoundedProtocol] = partial(BoundedProtocol, edge, **protocol_args)
        self._protocol: BoundedProtocol | None = None  # from the first byte on
        self._first = b""
        self._first_reads = edge.first_reads
        self._is_ending = False  # the server stops

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._made_at = asyncio.get_running_loop().time()
        peer = transport.get_extra_info("peername")  # None if the client has left
        self._group = ClientGroup(client_network(peer[0]) if peer else "", is_authenticated=False)
        self._connections.add(self)
        if (victim := self._edge.table.add(transport, self._group.name)) is not None:
            victim.abort()
        if self._edge.ending.is_set():
            self.shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._protocol is not None:
            self._protocol.connection_lost(exc)
        else:
            self._connections.discard(self)
            self._first_reads.withdraw(self._group, self._begin)
        self._edge.table.remove(self._transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._protocol is None:
            return _BUFFER[:_FIRST_READ_BYTES]
        return _BUFFER if self._protocol.is_in_body else _BUFFER[:_HEAD_READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        if self._protocol is not None:
            self._protocol.data_received(_BUFFER[:nbytes])
            return
        self._first = bytes(_BUFFER[:nbytes])
        self._transport.pause_reading()
        if not self._first_reads.is_free:  # a client with a known key does not wait behind clients without one
            header = _AUTHORIZATION.search(self._first)
            group = header and self._edge.group_of_key(header[1].decode("latin-1").strip())
            if group is not None:
                self._group, self._first_reads = group, self._edge.first_reads_of_tenants
        self._first_reads.take(self._group, self._begin)

    def _begin(self) -> None:
        if self._transport.is_closing():
            return
        self._connections.discard(self)
        first, self._first = self._first, b""
        self._protocol = self._make_protocol()
        self._protocol.connection_made(self._transport)
        self._transport.resume_reading()
        self._protocol.data_received(first)
        if self._is_ending:
            self._protocol.shutdown()

    def pause_writing(self) -> None:
        assert self._protocol is not None
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        assert self._protocol is not None
        self._protocol.resume_writing()

    def shutdown(self) -> None:
        """The server stops. A request that has arrived, or arrives within ``LAST_REQUEST_S``, is still answered."""
        self._is_ending = True
        if not self._first:
            asyncio.get_running_loop().call_later(LAST_REQUEST_S, self._close_unless_begun)

    def _close_unless_begun(self) -> None:
        if self._protocol is None and not self._first:
            self._transport.close()

    def check(self, now: float) -> None:
        """Closes a connection on which nothing arrives within ``head_s``, and one that waits for its turn for twice as
        long: under a steady flood the oldest clients have given up, which only a read would show.
        """
        limit_s = self._edge.limits.head_s * (2 if self._first else 1)
        if now - self._made_at >= limit_s:
            self._transport.close()
