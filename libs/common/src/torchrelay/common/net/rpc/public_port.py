"""The port of a gRPC server that strangers reach: counts the frames of each client, and forwards the bytes to grpcio.

grpcio has no setting that bounds a flood of frames, and serves all that it has read before it sees to another client.
It listens on an abstract Unix address instead; this accepts the connections, on the event loop, with two sockets each.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from contextlib import ExitStack
from typing import Final

from torchrelay.common.net.rpc.frame_limits import FrameCounter, FrameLimits, go_away
from torchrelay.common.net.rpc.options import PublicLimits

_BACKLOG: Final = 1024
_BUFFER: Final = memoryview(bytearray(16 << 10))  # of all connections: what is read is copied before the next read
_MAX_UNSENT_BYTES: Final = 16 << 10  # to one side; beyond that, the other side is not read
# At once. grpcio's client sends headers, which count twice, and two or three small frames for a call.
_SMALL_FRAMES, _SMALL_FRAMES_OF_A_CALL = 500, 6
_RETRY_S: Final = 0.01
_FLUSH_S: Final = 10.0  # for one side to take the rest, once the other has closed
_STOP_S: Final = 1.0  # the same, when the server has stopped


class _Side(asyncio.BufferedProtocol):
    """One of a connection's two sockets: what it receives is sent by the other."""

    transport: asyncio.Transport
    other: _Side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # a stream's, whose class uvloop keeps
        self.transport.set_write_buffer_limits(_MAX_UNSENT_BYTES)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _BUFFER

    def send(self, data: bytes) -> None:
        self.transport.write(data)

    def pause_writing(self) -> None:
        if not self.other.transport.is_closing():
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if not self.other.transport.is_closing():
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.other.end()

    def end(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()  # once everything is sent
            asyncio.get_running_loop().call_later(_FLUSH_S, self.transport.abort)


class _Client(_Side):
    """Made after the side of grpcio, which may have spoken, or closed, by then."""

    def __init__(self, connections: set[_Client], limits: FrameLimits) -> None:
        self.counter = FrameCounter(time.monotonic(), limits)
        self.closed = asyncio.get_running_loop().create_future()
        self._connections = connections
        self._is_made = False
        self._early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._is_made = True
        self._connections.add(self)
        self.send(self._early)
        if self.other.transport.is_closing():
            self.end()

    def send(self, data: bytes) -> None:
        if self._is_made:
            super().send(data)
        else:
            self._early += data

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(_BUFFER[:nbytes])
        if (fault := self.counter.receive(data, time.monotonic())) is None:
            self.other.send(data)
        else:
            self.send(go_away(fault))  # garbled, if the server is in the middle of a frame
            self.end()
            self.other.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self.closed.set_result(None)
        super().connection_lost(exc)

    def end(self) -> None:
        if self._is_made:
            super().end()


class _Upstream(_Side):
    """The side of grpcio."""

    other: _Client

    def buffer_updated(self, nbytes: int) -> None:
        self.other.counter.answer(nbytes)
        self.other.send(bytes(_BUFFER[:nbytes]))


class PublicPort:
    """Listens at once, accepts from ``start`` on. Raises ``OSError`` if it cannot listen.

    Connections beyond the limit are closed. ``address`` is what grpcio must listen on.
    """

    def __init__(self, host: str, port: int, limits: PublicLimits) -> None:
        self._listening = socket.create_server((host, port), backlog=_BACKLOG)
        self._listening.setblocking(False)
        self.port: int = self._listening.getsockname()[1]
        self._name = f"torchrelay-{secrets.token_hex(16)}"  # abstract: nothing is left behind by a killed process
        self.address = f"unix-abstract:{self._name}"
        self._max_connections = limits.connections
        self._frame_limits = FrameLimits(_SMALL_FRAMES + _SMALL_FRAMES_OF_A_CALL * limits.streams)
        self._connections: set[_Client] = set()
        self._accepting: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._accepting = asyncio.create_task(self._accept(), name="grpc-accept")

    async def stop_accepting(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait({self._accepting})
        self._listening.close()

    async def close(self) -> None:
        """Ends what is still open once the server has stopped; clients get a moment to take the rest."""
        if clients := list(self._connections):
            await asyncio.wait([client.closed for client in clients], timeout=_STOP_S)
            for client in clients:
                client.transport.abort()

    async def _accept(self) -> None:
        """One after the other, so that a flood of connections leaves turns to everything else on the loop."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listening)
                await self._connect(sock)
            except OSError:  # no descriptor is left, or grpcio's queue is full
                await asyncio.sleep(_RETRY_S)

    async def _connect(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with ExitStack() as undo:
            undo.callback(sock.close)
            if len(self._connections) >= self._max_connections:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            inner = undo.enter_context(socket.socket(socket.AF_UNIX))
            inner.setblocking(False)
            inner.connect(f"\0{self._name}")
            client, upstream = _Client(self._connections, self._frame_limits), _Upstream()
            client.other, upstream.other = upstream, client
            await loop.create_unix_connection(lambda: upstream, sock=inner)
            undo.callback(upstream.transport.abort)
            await loop.connect_accepted_socket(lambda: client, sock)
            undo.pop_all()
