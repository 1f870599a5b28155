"""uvicorn embedded in our process: listens, serves, and drains on request."""

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

from torchrelay.gateway.http.connection import Connection
from torchrelay.gateway.http.connections import ConnectionLimits, ConnectionTable
from torchrelay.gateway.http.lingering_close import LingeringSockets
from torchrelay.gateway.http.protocol import BoundedProtocol, Door, LaneOf, LaneOfKey
from torchrelay.gateway.http.read_limits import ReadLimits
from torchrelay.gateway.http.turns import Turns

CHECK_INTERVAL_S = 0.5
BACKLOG = 1024  # what is accepted in one go must be less than max_keyless_connections


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """``idle_s``: of a connection without a request. ``stall_s``: of a client that takes nothing of its answer."""

    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    read: ReadLimits = field(default_factory=ReadLimits)
    idle_s: int = 75  # longer than clients pool connections, so that they close first
    stall_s: float = 60.0


DEFAULT_LIMITS = HttpLimits()


class HttpServer(uvicorn.Server):
    """``port`` is the port it listens on."""

    port: int

    def stop_accepting(self) -> None:
        """Starts the shutdown; leaving the block of ``http_server`` waits for it."""
        self.should_exit = True

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
    lane_of: LaneOf = lambda scope: None,
    lane_of_key: LaneOfKey = lambda authorization: None,
) -> AsyncIterator[HttpServer]:
    """Serves ``app`` inside the block. Leaving it stops accepting, waits ``drain_s`` for running responses, and cancels
    the rest. ``lane_of``, ``lane_of_key``: as ``Door``.
    """
    listening = socket.create_server((host, port), backlog=BACKLOG)
    if sys.platform == "linux":  # inherited by connections; enforced by the kernel, so free per token
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.stall_s * 1000))
    listening.setblocking(False)
    lingering = LingeringSockets()
    table: ConnectionTable[asyncio.Transport] = ConnectionTable(limits.connections)
    door = Door(table, lingering, limits.read, limits.stall_s, lane_of, lane_of_key, Turns(), Turns(), Turns())

    config = uvicorn.Config(
        app,
        loop="none",
        http=partial(Connection, door),  # type: ignore[arg-type]  # it only has to make protocols
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # the client's address is never used
        server_header=False,
        date_header=False,
        timeout_keep_alive=limits.idle_s,
        timeout_graceful_shutdown=math.ceil(drain_s),
        backlog=BACKLOG,
    )
    server = HttpServer(config)
    server.port = listening.getsockname()[1]
    async with asyncio.TaskGroup() as group:
        checking = group.create_task(_check(server), name="http-checks")
        serving = group.create_task(server.serve(sockets=[listening]), name="http")
        serving.add_done_callback(lambda _: checking.cancel())
        try:
            yield server
        finally:
            server.stop_accepting()
            await asyncio.wait({serving})  # also after an error: cancelled, uvicorn would leave its sockets open
    lingering.end_all()


async def _check(server: HttpServer) -> None:
    """Looks for connections that are too slow; one timer for all, so that requests set none."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(CHECK_INTERVAL_S)
        now = loop.time()
        for connection in list(server.server_state.connections):
            assert isinstance(connection, (Connection, BoundedProtocol))
            connection.check(now)
