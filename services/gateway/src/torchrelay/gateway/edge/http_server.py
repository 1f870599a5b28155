"""The REST server: uvicorn in this process, which listens, serves, and drains on request."""

from __future__ import annotations

import asyncio
import math
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from torchrelay.common.host.addresses import listening_socket
from torchrelay.gateway.edge.connection_table import ConnectionLimits, ConnectionTable
from torchrelay.gateway.edge.http_connection import Connection
from torchrelay.gateway.edge.http_protocol import LAST_REQUEST_S, BoundedProtocol, Edge, GroupOf, GroupOfKey
from torchrelay.gateway.edge.read_limits import ReadLimits

CHECK_INTERVAL_S = 0.5
BACKLOG = 1024  # connections accepted in one go must be fewer than max_keyless_connections


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of the REST server."""

    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    read: ReadLimits = field(default_factory=ReadLimits)
    idle_s: int = 75  # without a request; longer than clients pool connections, so that they close first
    stall_s: float = 60.0  # of a client that reads nothing of its answer


DEFAULT_LIMITS = HttpLimits()


class HttpServer(uvicorn.Server):
    """uvicorn's server. ``port`` is the port it listens on; ``ending`` is set once it accepts no more connections."""

    port: int

    def __init__(self, config: uvicorn.Config, ending: asyncio.Event) -> None:
        super().__init__(config)
        self.ending = ending

    def stop_accepting(self) -> None:
        """Starts the shutdown; leaving the block of ``http_server`` waits for it."""
        self.should_exit = True

    async def last_requests(self) -> None:
        """Waits until no connection may begin a request any more. Call it after ``stop_accepting``."""
        await self.ending.wait()
        await asyncio.sleep(LAST_REQUEST_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves what has arrived by now: the kernel resets connections that a closed socket has not accepted."""
        for _ in range(2):  # the first turn of the event loop may have looked for connections before this call
            await asyncio.sleep(0)
        self.ending.set()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the process (``run_service``)."""
        yield


@asynccontextmanager
async def http_server(
    app: ASGIApp,
    host: str,
    port: int,
    drain_s: float,
    limits: HttpLimits = DEFAULT_LIMITS,
    group_of: GroupOf = lambda scope: None,
    group_of_key: GroupOfKey = lambda authorization: None,
) -> AsyncIterator[HttpServer]:
    """Serves ``app`` inside the block. Leaving it stops accepting, waits ``drain_s`` for running responses, and cancels
    the rest. ``group_of`` and ``group_of_key`` are those of ``Edge``.
    """
    listening = listening_socket(host, port, BACKLOG)
    if sys.platform == "linux":  # connections inherit it; the kernel enforces it, at no cost per token
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.stall_s * 1000))
    listening.setblocking(False)
    edge = Edge(ConnectionTable(limits.connections), limits.read, limits.stall_s, group_of, group_of_key)
    config = uvicorn.Config(
        app,
        loop="none",
        http=partial(Connection, edge),  # type: ignore[arg-type]  # uvicorn only calls it to make protocols
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # nothing uses the client's address
        server_header=False,
        timeout_keep_alive=limits.idle_s,
        timeout_graceful_shutdown=math.ceil(drain_s),
        backlog=BACKLOG,
    )
    server = HttpServer(config, edge.ending)
    server.port = listening.getsockname()[1]
    async with asyncio.TaskGroup() as group:
        checking = group.create_task(_check(server), name="http-checks")
        serving = group.create_task(server.serve(sockets=[listening]), name="http")
        serving.add_done_callback(lambda _: checking.cancel())
        try:
            yield server
        finally:
            server.stop_accepting()
            await asyncio.wait({serving})  # even after an error: uvicorn leaves its sockets open when it is cancelled
    edge.lingering.end_all()


async def _check(server: HttpServer) -> None:
    """Checks all connections for slowness; one timer for all is cheaper than one per request."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(CHECK_INTERVAL_S)
        now = loop.time()
        for connection in list(server.server_state.connections):
            assert isinstance(connection, (Connection, BoundedProtocol))
            connection.check(now)
