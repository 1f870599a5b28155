"""Limits of size, number and pace for the bytes of an HTTP connection."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.support.raw_http import RawConnection, head, raw_connection
from tests.support.wait import HANG_S
from torchrelay.common.host.addresses import join_address
from torchrelay.gateway.edge.connection_table import ConnectionLimits, ConnectionTable
from torchrelay.gateway.edge.http_protocol import MAX_PIPELINED
from torchrelay.gateway.edge.http_server import HttpLimits, HttpServer, http_server
from torchrelay.gateway.edge.read_limits import ReadLimits
from torchrelay.gateway.edge.turns import ClientGroup

LIMITS = ReadLimits(head_bytes=2048, num_headers=20, url_bytes=512)
# What Java's client and `curl --http2` send by default over http://.
OFFER = (
    b"POST / HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\n"
    b"upgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAA\r\n"
)
QUICK = ReadLimits(head_s=0.5, silence_s=0.5, min_bytes_per_s=1 << 20)


@dataclass
class BodyApp:
    """Reads the body once ``may_read`` is set, and answers with its number of bytes."""

    may_read: asyncio.Event = field(default_factory=asyncio.Event)
    num_begun: int = 0
    num_bytes: int = 0
    is_disconnected: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_begun += 1
        if scope["path"] == "/refused":
            await answer_empty(send, 401)
            return
        if scope["path"] == "/known":
            scope["state"]["show_key"]("acme")
        await self.may_read.wait()
        has_more = True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.is_disconnected = True
                return
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
    async def connect(read: ReadLimits = LIMITS, **limits: float) -> AsyncIterator[RawConnection]:
        http_limits = HttpLimits(read=read, **limits)  # type: ignore[arg-type]
        async with http_server(app, "127.0.0.1", 0, 1, http_limits) as served, raw_connection(served.port) as raw:
            yield raw

    return connect


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        (b"GET /" + b"a" * 600 + b" HTTP/1.1\r\n", 414, "512 bytes (setting max_url_bytes)"),
        (b"GET /" + b"a" * 40_000, 414, "max_url_bytes"),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 100_000, 431, "2,048 bytes (setting max_head_bytes)"),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 2045 + b"\r\n\r\n", 431, "max_head_bytes"),
        (b"GET / HTTP/1.1\r\n" + b"a" * 100_000, 431, "max_head_bytes"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 21 + b"\r\n", 431, "20 headers (setting max_headers)"),
        (b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 100_000, 431, "max_headers"),
        (b"NONSENSE\r\n\r\n", 400, "not valid HTTP"),
        (b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", 400, "not valid HTTP"),
        (b"GET / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", 400, "not valid HTTP"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400, "not valid HTTP"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "must have one Host header"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n", 400, "must have one Host header"),
        (b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n", 400, "not valid HTTP"),
        (b"CONNECT /x HTTP/1.1\r\nhost: x\r\n\r\n", 400, "not valid HTTP"),
        (OFFER + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", 400, "not valid HTTP"),
        (OFFER + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400, "not valid HTTP"),
        (b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n", 400, "not valid HTTP"),
        (OFFER + b"x: " + b"a" * 2000 + b"\r\n\r\n", 431, "max_head_bytes"),
        (head("POST", content_length="1e9"), 400, "not valid HTTP"),
        (head("POST", content_length="9" * 40), 400, "not valid HTTP"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400, "not valid HTTP"),
        (head("POST", transfer_encoding="gzip"), 400, "not valid HTTP"),
        (head("POST", transfer_encoding="chunked") + b"f" * 18 + b"\r\n", 400, "not valid HTTP"),
        (b"GET / HTTP/1.1\r\nx: a\r\n" + b" b\r\n" * 100_000, 400, "not valid HTTP"),
        (b"A" * 100_000, 400, "not valid HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600), 400, "not valid HTTP"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(50), 400, "not valid HTTP"),
        (b"GET / HTTP/9.9\r\n\r\n", 400, "not valid HTTP"),
        (b"GET / HTTP/1.1\r\nx: a\0b\r\n\r\n", 400, "not valid HTTP"),
        (b"GET / HTTP/1.1\r\n: b\r\n\r\n", 400, "not valid HTTP"),
    ],
    ids=lambda value: value[:30].decode("latin-1") if isinstance(value, bytes) else None,
)
async def test_head_above_a_limit_is_refused(connected: Connected, sent: bytes, status: int, said: str) -> None:
    async with connected() as raw:
        await raw.send(sent)
        answer = await raw.answer()
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert said in answer.message
        assert parsedate_to_datetime(answer.headers["date"]).tzinfo is UTC
        await raw.wait_closed()


async def test_head_at_its_limits_is_answered(connected: Connected) -> None:
    async with connected() as raw:
        await raw.send(b"GET /" + b"a" * 511 + b" HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 19 + b"\r\n")
        assert (await raw.answer()).status == 200
        await raw.send(b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 2000 + b"\r\n\r\n")
        assert (await raw.answer()).status == 200


async def test_head_in_pieces_counts_as_a_whole(connected: Connected) -> None:
    async with connected() as raw:
        await raw.send(head("POST", content_length=3) + b"ab")
        for piece in (b"cPOST / HT", b"TP/1.1\r\nhost: x\r\nconte", b"nt-length: 2\r\n", b"\r\n", b"d", b"e"):
            await raw.send(piece)
        assert [(await raw.answer()).body for _ in range(2)] == [b"3", b"5"]
        await raw.send(b"GET / HTTP/1.1\r\n")
        for _ in range(3):
            await raw.send(b"x: " + b"a" * 800 + b"\r\n")
        assert (await raw.answer()).status == 431


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


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_answer_without_length_is_chunked_only_for_clients_that_know_chunks(version: bytes) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first ", "more_body": True})
        await send({"type": "http.response.body", "body": b"last"})

    async with http_server(app, "127.0.0.1", 0, 1) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/%s\r\nhost: x\r\nconnection: close\r\n\r\n" % version)
        head_, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert b"\r\nconnection: close" in head_
    is_chunked = version == b"1.1"
    assert (b"transfer-encoding" in head_) == is_chunked
    assert body == (b"6\r\nfirst \r\n4\r\nlast\r\n0\r\n\r\n" if is_chunked else b"first last")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_answer_to_http_1_0_keeps_its_declared_length(connected: Connected, method: str) -> None:
    async with connected() as raw:
        await raw.send(f"{method} / HTTP/1.0\r\nhost: x\r\n\r\n".encode())
        answer = await raw.answer(has_body=method == "GET")
        assert (answer.status, answer.headers["content-length"]) == (200, "1")
        assert (answer.headers["connection"], answer.body) == ("close", b"0" if method == "GET" else b"")
        await raw.wait_closed()


async def test_crash_of_the_application_is_answered_to_http_1_0() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("a defect")

    async with http_server(app, "127.0.0.1", 0, 1) as server, raw_connection(server.port) as raw:
        await raw.send(b"GET / HTTP/1.0\r\nhost: x\r\n\r\n")
        answer = await raw.answer()
        assert (answer.status, answer.body) == (500, b"Internal Server Error")
        assert parsedate_to_datetime(answer.headers["date"]).tzinfo is UTC


async def test_requests_sent_ahead_are_bounded(connected: Connected, app: BodyApp) -> None:
    app.may_read.clear()
    async with connected() as raw:
        await raw.send(head() * (MAX_PIPELINED + 1))
        app.may_read.set()
        assert [(await raw.answer()).status for _ in range(MAX_PIPELINED + 1)] == [200] * (MAX_PIPELINED + 1)
        app.may_read.clear()
        await raw.send(head() * 500)
        await raw.wait_closed()
        assert app.num_begun <= MAX_PIPELINED + 2


@pytest.mark.parametrize("rest", [b"1;" + b"x" * 50_000, b"0\r\n" + b"x: y\r\n" * 5000, b"0\r\nx: " + b"y" * 50_000])
async def test_chunked_framing_without_content_is_bounded(connected: Connected, rest: bytes) -> None:
    async with connected() as raw:
        await raw.send(head("POST", transfer_encoding="chunked"))
        await raw.send(rest)
        assert (await raw.answer()).status in (400, 431)


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


async def test_early_answer_reaches_a_client_that_still_sends(connected: Connected) -> None:
    async with connected() as raw:
        await raw.send(head("POST", "/refused", content_length=1 << 30))
        assert (await raw.answer()).status == 401
        with pytest.raises(OSError):
            for _ in range(1000):
                await raw.send(bytes(1 << 20))


async def test_silent_connection_is_closed_after_its_time(connected: Connected) -> None:
    clock = asyncio.get_running_loop().time
    for sent in (b"", b"\r\n"):
        async with connected(QUICK) as raw:
            begin_s = clock()
            await raw.send(sent)
            await raw.wait_closed()
            assert clock() - begin_s > QUICK.head_s / 2  # not at once


ENDLESS_HEAD = "the headers did not end within 0.5 s (setting head_timeout_s)"
SILENT_BODY = "nothing of the body arrived for 0.5 s (setting body_silence_s)"


@pytest.mark.parametrize(
    ("num_before", "sent", "said"),
    [
        (0, b"G", ENDLESS_HEAD),
        (0, b"GET / HTTP/1.1\r\nhost", ENDLESS_HEAD),
        (0, head()[:-1], ENDLESS_HEAD),
        (1, b"GET / HTT", ENDLESS_HEAD),  # a second head has a time limit of its own
        (0, head("POST", content_length=9), SILENT_BODY),
        (0, head("POST", content_length=9) + b"abc", SILENT_BODY),
    ],
)
async def test_endless_head_or_body_is_refused(
    connected: Connected, app: BodyApp, num_before: int, sent: bytes, said: str
) -> None:
    async with connected(QUICK) as raw:
        for _ in range(num_before):
            await raw.send(head())
            assert (await raw.answer()).status == 200
        await raw.send(sent)
        answer = await raw.answer()
        assert (answer.status, answer.message) == (408, said)
        await raw.wait_closed()
    assert app.is_disconnected is (said == SILENT_BODY)


async def test_body_below_the_minimum_rate_is_refused(connected: Connected) -> None:
    async with connected(QUICK) as raw:
        await raw.send(head("POST", content_length=1 << 20))

        async def send_slowly() -> None:
            while True:
                await raw.send(b"x")
                await asyncio.sleep(0.02)

        sending_slowly = asyncio.ensure_future(send_slowly())
        answer = await raw.answer()
        sending_slowly.cancel()
        assert answer.status == 408 and "min_body_bytes_per_s" in answer.message


async def test_body_not_yet_read_is_not_late(connected: Connected, app: BodyApp) -> None:
    app.may_read.clear()
    async with connected(QUICK) as raw:
        await raw.send(head("POST", content_length=3))
        asyncio.get_running_loop().call_later(2.5 * QUICK.silence_s, app.may_read.set)
        asyncio.get_running_loop().call_later(2.6 * QUICK.silence_s, asyncio.ensure_future, raw.send(b"abc"))
        assert (await raw.answer()).body == b"3"


async def test_idle_connection_is_closed(connected: Connected) -> None:
    async with connected(idle_s=1) as raw:
        await raw.send(head())
        assert (await raw.answer()).status == 200
        await raw.wait_closed()


async def test_oldest_keyless_connection_is_closed_for_a_new_one(app: BodyApp) -> None:
    limits = HttpLimits(ConnectionLimits(total=8, keyless=4))
    async with (
        http_server(app, "127.0.0.1", 0, 1, limits) as server,
        raw_connection(server.port) as tenant,
        raw_connection(server.port) as oldest,
        raw_connection(server.port) as second,
    ):
        await tenant.send(head(path="/known"))
        assert (await tenant.answer()).status == 200
        async with raw_connection(server.port), raw_connection(server.port), raw_connection(server.port):
            await oldest.wait_closed()
            for used in (tenant, second):
                await used.send(head())
                assert (await used.answer()).status == 200


async def answer_empty(send: Send, status: int = 200) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def occupy(seconds: float) -> None:
    """Occupies the event loop."""
    time.sleep(seconds)


def group_of_key(authorization: str) -> ClientGroup | None:
    return ClientGroup("ten-acme", is_authenticated=True) if authorization == "Bearer tr-acme" else None


@asynccontextmanager
async def crowd(server: HttpServer, size: int) -> AsyncIterator[list[RawConnection]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(raw_connection(server.port)) for _ in range(size)]


@dataclass
class NotedApp:
    """Answers with nothing, and notes the paths of requests; each may occupy the event loop."""

    work_s: float = 0.0
    begun: list[str] = field(default_factory=list)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun.append(scope["path"])
        self.has_begun.set()
        occupy(self.work_s)
        await answer_empty(send)


async def test_known_key_is_served_before_waiting_keyless_requests() -> None:
    """Sixty keyless requests that each occupy the event loop, then a request with a key."""

    def group_of(scope: Mapping[str, Any]) -> ClientGroup | None:
        return None if scope["path"] == "/known" else ClientGroup("127.0.0.1", is_authenticated=False)

    app = NotedApp(work_s=0.005)
    async with (
        http_server(app, "127.0.0.1", 0, 1, group_of=group_of, group_of_key=group_of_key) as server,
        crowd(server, 60) as clients,
    ):
        for client in clients:
            await client.send(head(path="/keyless"))
        await app.has_begun.wait()
        async with raw_connection(server.port) as known:
            await known.send(head(path="/known", authorization="Bearer tr-acme"))
            assert (await known.answer()).status == 200
        assert app.begun.count("/keyless") <= 40
        for client in clients:
            assert (await client.answer()).status == 200


async def test_first_request_of_a_known_key_precedes_keyless_ones() -> None:
    app = NotedApp()
    async with http_server(app, "127.0.0.1", 0, 1, group_of_key=group_of_key) as server, crowd(server, 201) as clients:
        for number, client in enumerate(clients):
            known = {"authorization": "Bearer tr-acme"} if number == 100 else {}
            await client.send(head(path="/known" if known else "/keyless", **known))
        for client in clients:
            assert (await client.answer()).status == 200
    assert app.begun.index("/known") < 40


async def test_requests_waiting_for_a_turn_are_answered_at_shutdown() -> None:
    app = NotedApp(work_s=0.005)
    async with http_server(app, "127.0.0.1", 0, 5) as server, crowd(server, 60) as clients:
        for client in clients:
            await client.send(head())
        await app.has_begun.wait()
        server.stop_accepting()
        for client in clients:
            assert (await client.answer()).status == 200


async def test_connection_that_cannot_linger_leaves_the_table(
    connected: Connected, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[ConnectionTable[asyncio.Transport]] = []

    def make_table(limits: ConnectionLimits) -> ConnectionTable[asyncio.Transport]:
        tables.append(ConnectionTable(limits))
        return tables[-1]

    def no_descriptor(_descriptor: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, about: complaints.append(about["message"]))
    monkeypatch.setattr("torchrelay.gateway.edge.http_server.ConnectionTable", make_table)
    async with connected() as raw:
        monkeypatch.setattr("torchrelay.gateway.edge.lingering_close.os.dup", no_descriptor)
        await raw.send(head("POST", "/refused", content_length=1 << 30))
        assert (await raw.answer()).status == 401
        await raw.wait_closed()
        assert len(tables) == 1
        assert len(tables[0]) == 0 and not complaints


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


async def test_requests_that_reach_a_stopping_server_are_answered() -> None:
    """Connections that it has not accepted yet, accepted ones without a request, and an idle one."""
    async with AsyncExitStack() as stack:
        sending = [stack.enter_context(socket.socket()) for _ in range(20)]
        async with http_server(NotedApp(), "127.0.0.1", 0, 5) as server, crowd(server, 10) as silent:
            idle, begun, again, *silent = silent
            for client in (idle, again):
                await client.send(head())
                assert (await client.answer()).status == 200
            for client in (begun, again):
                await client.send(head()[:9])
            for waiting in sending:  # the event loop cannot run meanwhile
                waiting.connect(("127.0.0.1", server.port))
                waiting.sendall(head())
            stopping = asyncio.create_task(server.shutdown())  # at once, where stop_accepting would take a moment
            await server.ending.wait()
            for client in (begun, again):
                await client.send(head()[9:])
            for client in (idle, *silent):
                await client.send(head())
            for client in (idle, begun, again, *silent):
                answer = await client.answer()
                assert answer.status == 200 and answer.headers["connection"] == "close"
                await client.wait_closed()
            await stopping
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

    async with http_server(endless, "127.0.0.1", 0, drain_s=1, limits=HttpLimits(stall_s=0.5)) as server:
        reader = socket.create_connection(("127.0.0.1", server.port))
        reader.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(ended.wait(), HANG_S)
        (listening,) = server.servers[0].sockets  # connections inherit its options
        assert listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 500
        reader.close()


async def test_endless_response_is_cancelled_after_the_drain() -> None:
    started = asyncio.Event()
    async with httpx.AsyncClient(trust_env=False) as client:
        async with http_server(slow_app(started, asyncio.Event()), "127.0.0.1", 0, drain_s=1) as server:
            running = asyncio.create_task(client.get(f"http://127.0.0.1:{server.port}/"))
            await started.wait()
        with contextlib.suppress(httpx.HTTPError):
            await running
        assert running.done()
