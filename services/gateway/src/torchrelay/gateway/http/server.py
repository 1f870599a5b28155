"""uvicorn inside a process that has its own life: it listens, serves, and drains when told to."""

from __future__ import annotations

import asyncio
import math
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.types import ASGIApp

STALL_TIMEOUT_S = 60.0


class HttpServer(uvicorn.Server):
    """``port`` is where it listens."""

    port: int

    def stop_accepting(self) -> None:
        """Begins the end; leaving the block of ``http_server`` waits for it."""
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process (``run_service``), not to one of its servers."""
        yield


@asynccontextmanager
async def http_server(
    app: ASGIApp, host: str, port: int, drain_s: float, stall_s: float = STALL_TIMEOUT_S
) -> AsyncIterator[HttpServer]:
    """Serves ``app`` inside the block. Leaving it stops accepting, lets running responses end for ``drain_s``, and
    cancels those that have not. A client that takes nothing of its response for ``stall_s`` is disconnected.
    """
    listening = socket.create_server((host, port), backlog=2048)
    if sys.platform == "linux":  # connections inherit it; the system counts, so a token costs nothing
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1000))
    listening.setblocking(False)
    config = uvicorn.Config(
        app,
        loop="none",
        http="httptools",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # nothing here asks for the client's address
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,  # longer than clients keep a pooled connection, so that they close it and not we
        timeout_graceful_shutdown=math.ceil(drain_s),
    )
    server = HttpServer(config)
    server.port = listening.getsockname()[1]
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=[listening]), name="http")
        try:
            yield server
        finally:
            server.stop_accepting()
