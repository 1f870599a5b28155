"""A connection as the event loop sees it, which costs little until its first byte."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from torchrelay.gateway.http.protocol import BoundedProtocol, Door
from torchrelay.gateway.http.turns import Lane

_FIRST_READ_BYTES, _HEAD_READ_BYTES, _BODY_READ_BYTES = 4 << 10, 16 << 10, 64 << 10
_AUTHORIZATION = re.compile(rb"\r\nauthorization:([^\r\n]{1,512})\r\n", re.IGNORECASE)  # one way to match: linear time
_BUFFER = memoryview(bytearray(_BODY_READ_BYTES))  # of all connections: what is read is parsed before the next read


class Connection(asyncio.BufferedProtocol):
    """Reads into one small buffer: otherwise the event loop takes up to 256 KB at once from each connection.

    What comes first is read, and the rest left to the kernel, until the connection has its turn to be parsed.
    ``uvicorns``: what uvicorn makes its protocols of.
    """

    def __init__(self, door: Door, **uvicorns: Any) -> None:
        self._door = door
        self._connections: set[Any] = uvicorns["server_state"].connections
        self._make_protocol: Callable[[], BoundedProtocol] = partial(BoundedProtocol, door, **uvicorns)
        self._protocol: BoundedProtocol | None = None  # from the first byte on
        self._first = b""
        self._first_reads = door.first_reads
        self._is_ending = False  # the server stops

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._made_at = asyncio.get_running_loop().time()
        peer = transport.get_extra_info("peername")  # none if it has left
        self._lane = Lane(peer[0] if peer else "", is_of_strangers=True)
        self._connections.add(self)
        if (victim := self._door.table.add(transport, self._lane.name)) is not None:
            victim.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._protocol is not None:
            self._protocol.connection_lost(exc)
        else:
            self._connections.discard(self)
            self._first_reads.give_up(self._lane, self._begin)
        self._door.table.remove(self._transport)

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
        if not self._first_reads.is_free:  # whoever has a key does not wait for a crowd without
            found = _AUTHORIZATION.search(self._first)
            if found is not None and (lane := self._door.lane_of_key(found[1].decode("latin-1").strip())) is not None:
                self._lane, self._first_reads = lane, self._door.first_reads_of_tenants
        self._first_reads.take(self._lane, self._begin)

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
        """The server stops: what has been asked is still answered."""
        if self._first:
            self._is_ending = True
        else:
            self._transport.close()

    def check(self, now: float) -> None:
        """Ends a connection on which nothing comes, and one that waited for its turn as long again: in a crowd without
        end the oldest have given up, which is not seen before they are read from.
        """
        limit_s = self._door.limits.head_s * (2 if self._first else 1)
        if now - self._made_at >= limit_s:
            self._transport.close()
