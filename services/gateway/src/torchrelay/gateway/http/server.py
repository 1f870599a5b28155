"""The REST server: uvicorn in this process, which listens, serves, and drains on request.

It trusts its network: limits of connections, heads and rates are those of the ingress (``deploy/chart/files``).
"""

from __future__ import annotations

import asyncio
import math
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from torchrelay.common.host.addresses import listening_socket
from torchrelay.gateway.exchange.http_exchange import CLOSE

LAST_REQUEST_S = 0.25  # for a request that is on its way when the server stops
BACKLOG = 1024


class HttpProtocol(HttpToolsProtocol):
    """HTTP on a connection. A client's offer to upgrade, such as to HTTP/2 without TLS, is ignored.

    uvicorn takes what follows such a head for the other protocol, and its application then waits for the body forever.
    """

    _head_without_offer = b""  # until it is parsed again

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
            if self.cycle is not None and self.cycle.response_complete and not self.transport.is_closing():
                self._wait_for_next_request()  # what came is of a body whose request is answered
        except httptools.HttpParserUpgrade as upgrade:
            self.parser = httptools.HttpRequestParser(self)  # the earlier parser cannot read on
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            rest, self._head_without_offer = self._head_without_offer + data[upgrade.args[0] :], b""
            self.data_received(rest)
        except httptools.HttpParserError:
            self.send_400_response("The request is not valid HTTP.")

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":  # the method of a proxy, whose parser stops here too
            raise ValueError("CONNECT")
        if self.parser.should_upgrade():
            line = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
            headers = (b"%s: %s" % header for header in self.headers if header[0] != b"upgrade")
            self._head_without_offer = b"\r\n".join([line, *headers, b"\r\n"])
        else:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._head_without_offer:
            return
        super().on_message_complete()

    def _wait_for_next_request(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)


class HttpServer(uvicorn.Server):
    """uvicorn's server. ``port`` is the port that it listens on."""

    port: int

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ended = asyncio.Event()
        self._is_ending = False

    def stop_accepting(self) -> None:
        """Starts the shutdown. A request that arrives within ``LAST_REQUEST_S`` is still answered, as the last of its
        connection.
        """
        if not self._is_ending:
            self._is_ending = True
            self.config.encoded_headers.append(CLOSE)
            self.server_state.default_headers = [*self.server_state.default_headers, CLOSE]
            asyncio.get_running_loop().call_later(LAST_REQUEST_S, setattr, self, "should_exit", True)

    async def last_requests(self) -> None:
        """Waits until no connection may begin a request any more. Call it after ``stop_accepting``."""
        await self._ended.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves what has arrived by now: the kernel resets connections that a closed socket has not accepted."""
        for _ in range(2):  # the first turn of the event loop may have looked for connections before this call
            await asyncio.sleep(0)
        self._ended.set()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the process (``run_service``)."""
        yield


@asynccontextmanager
async def http_server(
    app: ASGIApp, host: str, port: int, drain_s: float, idle_s: int = 75, stall_s: float = 60.0
) -> AsyncIterator[HttpServer]:
    """Serves ``app`` inside the block. Leaving it accepts no more, waits ``drain_s`` for running responses, and cancels
    the rest; call ``stop_accepting`` and ``last_requests`` before to lose no request that is on its way.

    ``idle_s``: after which a connection without a request is closed; longer than clients pool connections, so that they
    close first. ``stall_s``: after which the kernel ends a connection whose client reads nothing of its answer.
    """
    listening = listening_socket(host, port, BACKLOG)
    if sys.platform == "linux":  # connections inherit it
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1000))
    listening.setblocking(False)
    config = uvicorn.Config(
        app,
        loop="none",
        http=HttpProtocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # nothing uses the client's address
        server_header=False,
        timeout_keep_alive=idle_s,
        timeout_graceful_shutdown=math.ceil(drain_s),
        backlog=BACKLOG,
    )
    server = HttpServer(config)
    server.port = listening.getsockname()[1]
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve(sockets=[listening]), name="http")
        try:
            yield server
        finally:
            server.should_exit = True
            await asyncio.wait({serving})  # even after an error: uvicorn leaves its sockets open when it is cancelled
