"""The REST server: offers to upgrade, bodies that wait to be read, connections that end, and the shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.support.raw_http import RawConnection, head, raw_connection
from tests.support.wait import HANG_S
from torchrelay.common.host.addresses import join_address
from torchrelay.gateway.http.server import http_server

# What Java's client and `curl --http2` send by default over http://.
OFFER = (
    b"POST / HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\n"
    b"upgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAA\r\n"
)


@dataclass
class BodyApp:
    """Reads the body once ``may_read`` is set, and answers with the bytes that it has read since it was made."""

    may_read: asyncio.Event = field(default_factory=asyncio.Event)
    num_bytes: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.may_read.wait()
        has_more = True
        while has_more:
            message = await receive()
            self.num_bytes += len(message["body"])
            has_more = message["more_body"]
        answer = str(self.num_bytes).encode()
        length = (b"content-length", str(len(answer)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": answer})


@pytest.fixture
def app() -> BodyApp:
    made = BodyApp()
    made.may_read.set()
    return made


Connected = Callable[..., AbstractAsyncContextManager[RawConnection]]


@pytest.fixture
def connected(app: BodyApp) -> Connected:
    @asynccontextmanager
    async def connect(idle_s: int = 75) -> AsyncIterator[RawConnection]:
        async with http_server(app, "127.0.0.1", 0, 1, idle_s) as served, raw_connection(served.port) as raw:
            yield raw

    return connect


@pytest.mark.parametrize(
    "pieces",
    [
        [OFFER + b"content-length: 3\r\n\r\nabc"],
        [OFFER + b"content-length: 3\r\n\r\n", b"abc"],
        [OFFER[:40], OFFER[40:] + b"content-length: 3\r\n\r", b"\na", b"bc"],
        [OFFER + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n", b"2\r\nbc\r\n0\r\n\r\n"],
        [OFFER.replace(b"h2c", b"websocket") + b"content-length: 3\r\n\r\nabc"],
    ],
    ids=["at once", "body later", "in pieces", "chunked", "websocket"],
)
async def test_offer_to_upgrade_is_ignored(connected: Connected, pieces: list[bytes]) -> None:
    async with connected() as raw:
        for num_bytes in (b"3", b"6"):
            for piece in pieces:
                await raw.send(piece)
            assert (await raw.answer()).body == num_bytes
        await raw.send(OFFER + b"\r\n" + b"".join(pieces) + OFFER + b"content-length: 1\r\n\r\na" + head())
        assert [(await raw.answer()).body for _ in range(4)] == [b"6", b"9", b"10", b"10"]


@pytest.mark.parametrize(
    "sent",
    [
        b"NONSENSE\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n",
        OFFER + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_invalid_request_is_refused(connected: Connected, sent: bytes) -> None:
    async with connected() as raw:
        await raw.send(sent)
        assert (await raw.answer()).status == 400
        await raw.wait_closed()


async def test_body_stays_unread_until_the_application_reads(connected: Connected, app: BodyApp) -> None:
    app.may_read.clear()
    size = 64 << 20
    async with connected() as raw:
        await raw.send(head("POST", content_length=size))
        sending = asyncio.ensure_future(raw.send(bytes(size)))
        done, _ = await asyncio.wait({sending}, timeout=0.3)
        assert not done, "64 MiB were read early"
        app.may_read.set()
        await sending
        assert (await raw.answer(60)).body == str(size).encode()


async def test_idle_connection_is_closed(connected: Connected) -> None:
    async with connected(idle_s=1) as raw:
        await raw.send(head())
        assert (await raw.answer()).status == 200
        await raw.wait_closed()


async def test_connection_without_the_rest_of_an_answered_body_is_closed() -> None:
    async def answer_at_once(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async with http_server(answer_at_once, "127.0.0.1", 0, 1, idle_s=1) as served, raw_connection(served.port) as raw:
        await raw.send(head("POST", content_length=1000))
        assert (await raw.answer()).status == 404
        await raw.send(bytes(10))
        await raw.wait_closed()


def slow_app(started: asyncio.Event, go_on: asyncio.Event) -> ASGIApp:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first ", "more_body": True})
        started.set()
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"last"})

    return app


async def test_shutdown_finishes_responses_and_refuses_connections() -> None:
    started, go_on = asyncio.Event(), asyncio.Event()
    async with httpx.AsyncClient(trust_env=False) as client:
        async with http_server(slow_app(started, go_on), "127.0.0.1", 0, drain_s=5) as server:
            url = f"http://127.0.0.1:{server.port}/"
            running = asyncio.create_task(client.get(url))
            await started.wait()
            server.stop_accepting()
            asyncio.get_running_loop().call_soon(go_on.set)
        assert (await running).content == b"first last"
        with pytest.raises(httpx.ConnectError):
            await client.get(url)


async def test_requests_that_reach_a_stopping_server_are_answered(app: BodyApp) -> None:
    """Connections that it has not accepted yet, accepted ones without a request, a begun one, and an idle one."""
    async with AsyncExitStack() as stack:
        sending = [stack.enter_context(socket.socket()) for _ in range(20)]
        async with http_server(app, "127.0.0.1", 0, 5) as server:
            clients = [await stack.enter_async_context(raw_connection(server.port)) for _ in range(10)]
            idle, begun, *silent = clients
            await idle.send(head())
            assert (await idle.answer()).status == 200
            await begun.send(head()[:9])
            for waiting in sending:  # the event loop cannot run meanwhile
                waiting.connect(("127.0.0.1", server.port))
                waiting.sendall(head())
            server.stop_accepting()
            await begun.send(head()[9:])
            for client in (idle, *silent):
                await client.send(head())
            for client in clients:
                answer = await client.answer()
                assert answer.status == 200 and answer.headers["connection"] == "close"
                await client.wait_closed()
            await server.last_requests()
        for waiting in sending:
            assert waiting.recv(100).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(("host", "callers"), [("::1", ["::1"]), ("::", ["::1", "127.0.0.1"])])
async def test_ipv6_is_served(host: str, callers: list[str]) -> None:
    go_on = asyncio.Event()
    go_on.set()
    async with (
        httpx.AsyncClient(trust_env=False) as client,
        http_server(slow_app(asyncio.Event(), go_on), host, 0, drain_s=5) as server,
    ):
        for caller in callers:
            assert (await client.get(f"http://{join_address(caller, server.port)}/")).content == b"first last"


@pytest.mark.skipif(sys.platform != "linux", reason="the system has no such timeout")
async def test_client_that_reads_nothing_is_disconnected() -> None:
    ended = asyncio.Event()

    async def endless(_scope: Scope, receive: Receive, send: Send) -> None:
        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                await asyncio.sleep(0)

        writing = asyncio.create_task(write())
        while (await receive())["type"] != "http.disconnect":
            pass
        writing.cancel()
        ended.set()

    async with http_server(endless, "127.0.0.1", 0, drain_s=1, stall_s=0.5) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as reader:
            reader.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await asyncio.wait_for(ended.wait(), HANG_S)


async def test_endless_response_is_cancelled_after_the_drain() -> None:
    started = asyncio.Event()
    async with httpx.AsyncClient(trust_env=False) as client:
        async with http_server(slow_app(started, asyncio.Event()), "127.0.0.1", 0, drain_s=1) as server:
            running = asyncio.create_task(client.get(f"http://127.0.0.1:{server.port}/"))
            await started.wait()
        with contextlib.suppress(httpx.HTTPError):
            await running
        assert running.done()
