"""uvicorn embedded in our process: listens, serves, and drains on request."""

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
    app: ASGIApp, host: str, port: int, drain_s: float, stall_s: float = STALL_TIMEOUT_S
) -> AsyncIterator[HttpServer]:
    """Serves ``app`` inside the block. Leaving it stops accepting, waits ``drain_s`` for running responses, and cancels
    the rest. A client that reads nothing of its response for ``stall_s`` is disconnected.
    """
    listening = socket.create_server((host, port), backlog=2048)
    if sys.platform == "linux":  # inherited by connections; enforced by the kernel, so free per token
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
        proxy_headers=False,  # the client's address is never used
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,  # longer than clients pool connections, so that they close first
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
