"""The port of a public gRPC server: counts the frames of each client, and forwards the bytes to grpcio.

grpcio has no setting that bounds a flood of frames, and serves all that it has read before it sees to another client.
It listens on a Unix socket instead; this accepts the connections, on the event loop. With a client's first bytes, which
HTTP/2 wants at once, its connection gets a second socket, to grpcio: a crowd that says nothing costs next to nothing.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from enum import Enum, auto
from functools import partial
from typing import Final
from weakref import WeakValueDictionary

from torchrelay.common.errors import Unavailable
from torchrelay.common.host.addresses import client_network
from torchrelay.gateway.edge.call_messages import CallMessages
from torchrelay.gateway.edge.connection_table import ConnectionLimits, ConnectionTable
from torchrelay.gateway.edge.frame_limits import FrameCounter, FrameLimits, go_away
from torchrelay.gateway.edge.grpc_limits import GrpcLimits
from torchrelay.gateway.edge.pace import Pace

_BACKLOG: Final = 1024
_READ_BYTES: Final = 16 << 10  # at once
_READ_BYTES_WITH_KEY: Final = 64 << 10  # of a client that has shown one, and may send much
_BUFFER: Final = memoryview(bytearray(_READ_BYTES_WITH_KEY))  # of all connections: what is read is copied at once
_MAX_UNSENT_BYTES: Final = 16 << 10  # to one side; beyond that, the other side is not read
# At once. grpcio's client sends headers, which count twice, a message, and two or three small frames for a call.
_SMALL_FRAMES, _SMALL_FRAMES_OF_A_CALL = 500, 6
# Of a tenant, on all its connections: a few times what it can use for prompts, and a small part of the loop's time.
_BYTES_PER_S: Final = 32 << 20
_BURST_BYTES: Final = 256 << 10  # beyond it, its connections are read at that rate
_RETRY_S: Final = 0.01
_FLUSH_S: Final = 10.0  # for one side to take the rest, once the other has closed
_STOP_S: Final = 1.0  # the same, when the server has stopped

Begin = Callable[["_Client"], None]


class _Hold(Enum):
    """Reasons not to read a connection."""

    UNSENT = auto()  # the other side has much to take
    NOT_CONNECTED = auto()  # there is no other side yet
    PACE = auto()  # its tenant has sent too much


class _Side(asyncio.BufferedProtocol):
    """A socket of a connection's two; the other socket sends the bytes that this socket receives."""

    transport: asyncio.Transport
    other: _Side | None = None
    read_bytes = _READ_BYTES

    def __init__(self) -> None:
        self._holds: set[_Hold] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # a stream's, whose class uvloop keeps
        self.transport.set_write_buffer_limits(_MAX_UNSENT_BYTES)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _BUFFER[: self.read_bytes]

    def send(self, data: bytes) -> None:
        self.transport.write(data)

    def hold(self, reason: _Hold) -> None:
        """Reads nothing until each reason is gone."""
        self._holds.add(reason)
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def read_on(self, reason: _Hold) -> None:
        self._holds.discard(reason)
        if not self._holds and not self.transport.is_closing():
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.hold(_Hold.UNSENT)

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.read_on(_Hold.UNSENT)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.end()

    def end(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()  # once everything is sent
            asyncio.get_running_loop().call_later(_FLUSH_S, self.transport.abort)


class _Client(_Side):
    """A client's socket. ``begin`` is called at its first bytes, ``meet`` once the socket to grpcio is connected."""

    def __init__(self, limits: GrpcLimits, frames: FrameLimits, begin: Begin, forget: Callable[[], None]) -> None:
        super().__init__()
        self.counter = FrameCounter(time.monotonic(), frames)
        self.pace: Pace | None = None  # of its tenant, once it has shown a key
        self.closed = asyncio.get_running_loop().create_future()
        self._limits = limits
        self._begin = begin
        self._forget = forget
        self._timer: asyncio.TimerHandle | None = None  # ends it: it has said, or has taken, nothing
        self._first = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._set_timer(self._limits.head_s)

    def meet(self, upstream: _Upstream) -> None:
        """Forwards the first bytes, and all later ones, to ``upstream``."""
        self.other = upstream
        upstream.send(self._first)
        self._first = b""
        self.read_on(_Hold.NOT_CONNECTED)
        if self.transport.is_closing():
            upstream.end()

    def pause_writing(self) -> None:
        """Stops reading grpcio, whose end would then go unnoticed: a timer ends the client instead."""
        super().pause_writing()
        self._set_timer(self._limits.silence_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unset_timer()

    def _set_timer(self, limit_s: float) -> None:
        self._unset_timer()
        self._timer = asyncio.get_running_loop().call_later(limit_s, self.transport.abort)

    def _unset_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def buffer_updated(self, nbytes: int) -> None:
        fault = self.counter.receive(bytes(_BUFFER[:nbytes]), time.monotonic())
        data = bytes(self.counter.forwarded)
        self.counter.forwarded.clear()
        if fault is not None:
            self.send(go_away(fault))  # garbled, if the server is in the middle of a frame
            self.end()
            if self.other is not None:
                self.other.transport.abort()
        elif self.other is not None:
            self.other.send(data)
            if self.pace is not None and (wait_s := self.pace.after(nbytes, time.monotonic())) > 0:
                self.hold(_Hold.PACE)
                asyncio.get_running_loop().call_later(wait_s, self.read_on, _Hold.PACE)
        else:
            self._unset_timer()
            self.hold(_Hold.NOT_CONNECTED)
            self._first = data
            self._begin(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_timer()
        self._forget()
        self.closed.set_result(None)
        super().connection_lost(exc)


class _Upstream(_Side):
    """The socket to grpcio."""

    def __init__(self, client: _Client) -> None:
        super().__init__()
        self.other: _Client = client

    def buffer_updated(self, nbytes: int) -> None:
        self.other.counter.answer(nbytes)
        self.other.send(bytes(_BUFFER[:nbytes]))


def _make_folder(stack: ExitStack) -> str:
    """A folder that lasts as long as ``stack``, by a path short enough for a socket's address, which has 107 bytes."""
    try:
        # With mode 0700, so that other users cannot bypass the port.
        path = stack.enter_context(tempfile.TemporaryDirectory(prefix="torchrelay-grpc-"))
        descriptor = os.open(path, os.O_PATH)
    except OSError as error:
        raise Unavailable(f"gRPC finds no folder for its socket: {error}") from error
    stack.callback(os.close, descriptor)
    return f"/proc/self/fd/{descriptor}"


class PublicPort:
    """Accepts from ``listening``, which it owns from ``start`` on. grpcio must listen on ``address`` before."""

    def __init__(self, listening: socket.socket, limits: GrpcLimits) -> None:
        self._listening = listening
        self._listening.listen(_BACKLOG)
        self._listening.setblocking(False)
        self.port: int = self._listening.getsockname()[1]
        with ExitStack() as folder:
            self._path = _make_folder(folder) + "/socket"
            self._folder = folder.pop_all()
        self.address = f"unix:{self._path}"
        self._inner = -1  # grpcio's socket, once it has no name any more
        self._limits = limits
        allowance, calls = _SMALL_FRAMES + _SMALL_FRAMES_OF_A_CALL * limits.streams, 2 * limits.streams
        self._frame_limits = FrameLimits(allowance, calls=calls)
        self._connections = ConnectionTable[str](
            ConnectionLimits(limits.connections, limits.connections, max(1, limits.connections // 2))
        )
        self._clients: dict[str, _Client] = {}
        self._paces = WeakValueDictionary[str, Pace]()  # by tenant, while it has connections
        self._spoken: asyncio.Queue[tuple[str, _Client]] = asyncio.Queue()  # each connection comes once
        self._accepting: asyncio.Task[None] | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._owned = AsyncExitStack()  # the descriptor, and the task that accepts

    def hide_address(self) -> None:
        """Removes the name of grpcio's socket, so that a killed process leaves nothing behind."""
        self._inner = os.open(self._path, os.O_PATH)
        self._owned.callback(os.close, self._inner)
        self._folder.close()

    def dispose(self) -> None:
        """Removes the folder of a port that is not started."""
        self._folder.close()

    @property
    def num_connections(self) -> int:
        return len(self._clients)

    def show_key(self, peer: str, tenant_id: str) -> None:
        """A call of ``peer``, as gRPC names it, has shown a valid key: its connection is not closed for new ones."""
        self._connections.show_key(peer, tenant_id)
        if client := self._clients.get(peer):
            client.read_bytes = _READ_BYTES_WITH_KEY
            if client.pace is None:  # of the first tenant, where a proxy's connection carries several
                client.pace = self._paces.setdefault(tenant_id, Pace(_BYTES_PER_S, _BURST_BYTES))

    def messages(self, peer: str, stream: int) -> CallMessages:
        """The messages of a call of ``peer``, until ``end_call``."""
        client = self._clients.get(peer)
        return CallMessages() if client is None else client.counter.messages(stream)

    def end_call(self, peer: str, stream: int) -> None:
        if client := self._clients.get(peer):
            client.counter.forget(stream)

    async def start(self) -> None:
        """Begins to accept. When accepting fails, the calling task is cancelled, and ``close`` raises the error."""
        tasks = await self._owned.enter_async_context(asyncio.TaskGroup())
        self._accepting = tasks.create_task(self._accept(), name="grpc-accept")
        self._connecting = tasks.create_task(self._connect_spoken(), name="grpc-connect")

    async def stop_accepting(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait({self._accepting})
        self._listening.close()

    async def close(self) -> None:
        """Ends what is still open once the server has stopped; clients get a moment to take the rest."""
        if clients := list(self._clients.values()):
            await asyncio.wait([client.closed for client in clients], timeout=_STOP_S)
            for client in clients:
                client.transport.abort()
        if self._connecting is not None:
            self._connecting.cancel()
        self._folder.close()
        await self._owned.aclose()

    async def _accept(self) -> None:
        """Accepts singly, so that a flood of connections leaves turns to other tasks of the loop."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, (address, *_) = await loop.sock_accept(self._listening)
                await self._connect(sock, address)
            except OSError:  # no descriptor is left
                await asyncio.sleep(_RETRY_S)

    async def _connect(self, sock: socket.socket, address: str) -> None:
        loop = asyncio.get_running_loop()
        with ExitStack() as undo:
            undo.callback(sock.close)
            # Every process can list the names in use, so a name must not reveal the next one.
            name = f"torchrelay-{secrets.token_hex(16)}"
            peer = f"unix-abstract:{name}"
            if (victim := self._connections.add(peer, client_network(address))) is not None:
                if victim == peer:
                    return
                self._clients[victim].transport.abort()
            undo.callback(self._forget, peer)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            begin = partial(self._speak, name)
            client = _Client(self._limits, self._frame_limits, begin, partial(self._forget, peer))
            self._clients[peer] = client
            await loop.connect_accepted_socket(lambda: client, sock)
            undo.pop_all()

    def _speak(self, name: str, client: _Client) -> None:
        self._spoken.put_nowait((name, client))

    async def _connect_spoken(self) -> None:
        """Connects singly, as ``_accept`` does."""
        while True:
            name, client = await self._spoken.get()
            if not client.transport.is_closing():
                await self._connect_upstream(name, client)

    async def _connect_upstream(self, name: str, client: _Client) -> None:
        # Without a descriptor, or when grpcio's queue is full or grpcio has ended, the client must reconnect.
        with suppress(OSError), ExitStack() as undo:
            undo.callback(client.transport.abort)
            inner = undo.enter_context(socket.socket(socket.AF_UNIX))
            inner.setblocking(False)
            inner.bind(f"\0{name}")
            inner.connect(f"/proc/self/fd/{self._inner}")
            upstream = _Upstream(client)
            await asyncio.get_running_loop().create_unix_connection(lambda: upstream, sock=inner)
            client.meet(upstream)
            undo.pop_all()

    def _forget(self, peer: str) -> None:
        self._connections.remove(peer)
        self._clients.pop(peer, None)
