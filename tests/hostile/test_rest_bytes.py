"""Hostile bytes at the REST port, with a key and without: refused or bounded, while a neighbour's chats go on."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager

import httpx
import pytest

from tests.hostile.conftest import MAX_CONNECTIONS, SILENCE_S, Address, Watch
from tests.support.completions import headers
from tests.support.platform import Platform
from tests.support.raw_http import RawConnection, head, raw_connection
from tests.support.wait import HANG_S, wait_until
from torchrelay.cli.api.client import GatewayClient

pytestmark = pytest.mark.e2e

TOKENS, KEYS, FILES = "/v1/chat/completions", "/v1/keys", "/v1/uploads/upl-1/files/w"
ROUTES = [
    ("POST", TOKENS),
    ("POST", "/v1/completions"),
    ("POST", KEYS),
    ("POST", "/v1/tenants"),
    ("PUT", "/v1/prices"),
    ("POST", "/v1/uploads"),
    ("PUT", FILES),
    ("POST", "/v1/uploads/upl-1/commit"),
    ("PATCH", "/v1/models/x"),
    ("DELETE", "/v1/keys/x"),
    ("POST", "/v1/none"),
]
HUGE = 100 << 20
CASES = {
    **{f"keyless {method} {path}": (head(method, path, content_length=HUGE), 401) for method, path in ROUTES},
    **{
        f"keyless chunks {method} {path}": (head(method, path, transfer_encoding="chunked") + b"5\r\nabcde\r\n", 401)
        for method, path in ROUTES
    },
    **{
        f"KEY {method} {path} too long": (head(method, path, authorization="KEY", content_length=HUGE), 413)
        for method, path in ROUTES
        if path != FILES
    },
    "wrong key": (head("POST", KEYS, authorization="Bearer tr-nobody", content_length=HUGE), 401),
    "basic key": (head("POST", KEYS, authorization="Basic eDp5", content_length=HUGE), 401),
    "key of a megabyte": (head("POST", KEYS, authorization="Bearer " + "a" * (1 << 20)), 431),
    "length that is no number": (head("POST", KEYS, content_length="1e9"), 400),
    "negative length": (head("POST", KEYS, content_length=-5), 400),
    "length of 40 digits": (head("POST", KEYS, content_length="9" * 40), 400),
    "two lengths": (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
    "length and chunks": (head("POST", KEYS, content_length=5, transfer_encoding="chunked"), 400),
    "unknown encoding": (head("POST", KEYS, transfer_encoding="gzip"), 400),
    "KEY chunks without a number": (
        head("POST", KEYS, authorization="KEY", transfer_encoding="chunked") + b"xyz\r\n",
        400,
    ),
    "KEY chunk of 2**70": (
        head("POST", KEYS, authorization="KEY", transfer_encoding="chunked") + b"f" * 18 + b"\r\n",
        400,
    ),
    "KEY chunk extension without end": (
        head("POST", KEYS, authorization="KEY", transfer_encoding="chunked") + b"5;" + b"x" * 200_000,
        400,
    ),
    "KEY trailers without end": (
        head("POST", KEYS, authorization="KEY", transfer_encoding="chunked") + b"0\r\n" + b"x: y\r\n" * 20_000,
        431,
    ),
    "KEY trailer without end": (
        head("POST", KEYS, authorization="KEY", transfer_encoding="chunked") + b"0\r\nx: " + b"y" * 200_000,
        400,
    ),
    "header of 20 MB": (b"GET / HTTP/1.1\r\nx: " + b"a" * 20_000_000, 431),
    "name of a header of 20 MB": (b"GET / HTTP/1.1\r\n" + b"a" * 20_000_000, 431),
    "20,000 headers": (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000 + b"\r\n", 431),
    "101 headers": (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 101 + b"\r\n", 431),
    "empty headers": (b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 200_000, 431),
    "folded header": (b"GET / HTTP/1.1\r\nx: a\r\n" + b" b\r\n" * 100_000, 400),
    "URL of 20 MB": (b"GET /" + b"a" * 20_000_000, 414),
    "URL of 9 kB": (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", 414),
    "query of 20 MB": (b"GET /?" + b"a=b&" * 5_000_000, 414),
    "method of 20 MB": (b"A" * 20_000_000, 400),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600), 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(50), 400),
    "HTTP/9.9": (b"GET / HTTP/9.9\r\n\r\n", 400),
    "raw bytes in the URL": (b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "NUL in a header": (b"GET / HTTP/1.1\r\nx: a\0b\r\n\r\n", 400),
    "a header without a name": (b"GET / HTTP/1.1\r\n: b\r\n\r\n", 400),
    "CONNECT": (b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "TRACE": (b"TRACE / HTTP/1.1\r\nhost: x\r\n\r\n", 401),
    "a web socket": (head("GET", "/v1/models", connection="Upgrade", upgrade="websocket"), 401),
    "an absolute URL": (b"GET http://other/v1/models HTTP/1.1\r\nhost: x\r\n\r\n", 401),
    "dots in the path": (b"GET /v1/../../etc/passwd HTTP/1.1\r\nhost: x\r\n\r\n", 401),
    "expects to go on": (head("POST", TOKENS, content_length=HUGE, expect="100-continue"), 401),
}
ENDLESS = (
    b"GET / HTTP/1.1\r\nhost: x\r\n",
    b"G",
    head("POST", KEYS, authorization="KEY", content_length=5),
    head("POST", TOKENS, authorization="KEY", content_length=500) + b'{"m',
)


async def test_malformed_request_is_refused(
    watch: Watch, rest: Address, mallory: str, subtests: pytest.Subtests
) -> None:
    for case, (sent, status) in CASES.items():
        with subtests.test(case):
            await _assert_refused_and_closed(rest, sent, status, mallory)


async def test_request_that_does_not_end_is_refused(watch: Watch, rest: Address, mallory: str) -> None:
    await asyncio.gather(*(_assert_refused_and_closed(rest, sent, 408, mallory) for sent in ENDLESS))


async def _assert_refused_and_closed(rest: Address, sent: bytes, status: int, key: str) -> None:
    async with raw_connection(rest.port, rest.host) as raw:
        try:
            await raw.send(sent.replace(b"authorization: KEY", f"authorization: Bearer {key}".encode()))
        except OSError:
            pass  # refused while it is being sent; the answer may be lost to such a client
        else:
            await _assert_refused(raw, status)
        await raw.wait_closed()


async def _assert_refused(raw: RawConnection, status: int) -> None:
    try:
        answer = await raw.answer()
    except (OSError, asyncio.IncompleteReadError):
        return
    assert answer.status == status
    assert answer.message


async def test_silent_connection_is_closed(watch: Watch, rest: Address) -> None:
    await asyncio.gather(*(_assert_closed_unanswered(rest, sent) for sent in (b"", b"\r\n" * 20, b"\n")))


async def _assert_closed_unanswered(rest: Address, sent: bytes) -> None:
    async with raw_connection(rest.port, rest.host) as raw:
        await raw.send(sent)
        await raw.wait_closed()


@contextmanager
def crowd(rest: Address, size: int, receive_bytes: int = 0) -> Iterator[list[socket.socket]]:
    """Connections of one client. ``receive_bytes``: the receive buffer of each, instead of the default."""
    with ExitStack() as stack:
        sockets: list[socket.socket] = []
        for _ in range(size):
            each = stack.enter_context(socket.socket())
            if receive_bytes:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            each.settimeout(HANG_S)
            each.connect((rest.host, rest.port))
            each.setblocking(False)
            sockets.append(each)
        yield sockets


def send_all(sockets: list[socket.socket], data: bytes) -> int:
    """Sends as much as each socket takes at once; returns the number of sockets that are still open."""
    num_open = 0
    for each in sockets:
        try:
            each.send(data)
            num_open += 1
        except BlockingIOError:
            num_open += 1
        except OSError:
            pass
    return num_open


def read_to_end(sock: socket.socket) -> bytes:
    """The rest of the answer, until the server ends the connection."""
    sock.settimeout(HANG_S)
    answer = bytearray()
    try:
        while piece := sock.recv(1 << 16):
            answer += piece
    except ConnectionError:
        pass
    return bytes(answer)


def await_closed(sockets: list[socket.socket]) -> None:
    """Until the server has ended all connections."""
    for each in sockets:
        read_to_end(each)


def test_ten_thousand_idle_connections_end(watch: Watch, rest: Address) -> None:
    with crowd(rest, 10_000) as sockets:
        await_closed(sockets)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nx: " + b"a" * 15_000,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 99,
        b"GET / HTTP/1.1\r\nauthorization:" + b" " * 4000,
        b"GET /" + b"a" * 8000,
        head("POST", TOKENS, content_length=HUGE) + b"x" * 200_000,
        head("POST", KEYS, transfer_encoding="chunked") + b"ffffff\r\n" + b"x" * 200_000,
        head("GET", "/health") * 2000,
        head("GET", "/openapi.json") * 500,
    ],
    ids=["long headers", "many headers", "blanks", "long URLs", "bodies", "chunks", "requests ahead", "answers unread"],
)
def test_connections_that_send_and_wait_are_closed(sent: bytes, watch: Watch, rest: Address) -> None:
    with crowd(rest, 1000) as sockets:
        for _ in range(4):
            send_all(sockets, sent)
        await_closed(sockets)


def test_connections_of_random_bytes_are_closed(watch: Watch, rest: Address) -> None:
    dice = random.Random(7)
    starts = [b"", b"GET / HTTP/1.1\r\n", head("POST", KEYS, transfer_encoding="chunked")]
    for _ in range(10):
        with crowd(rest, 30) as sockets:
            for each in sockets:
                send_all([each], dice.choice(starts) + dice.randbytes(dice.randrange(1, 5000)))
            await_closed(sockets)


async def test_bodies_of_a_tenant_are_bounded_together(watch: Watch, rest: Address, mallory: str) -> None:
    """Sixty bodies of 8 MiB each, all but their last byte."""
    size = 8 << 20
    async with AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(raw_connection(rest.port, rest.host)) for _ in range(60)]

        async def send(raw: RawConnection) -> int:
            try:
                await raw.send(head("POST", KEYS, authorization=f"Bearer {mallory}", content_length=size))
                await raw.send(bytes(size - 1))
                return (await raw.answer()).status
            except (OSError, asyncio.IncompleteReadError):
                return 0

        statuses = await asyncio.gather(*map(send, connections))
        assert statuses.count(429) >= 20
        assert set(statuses) <= {0, 408, 429}


def test_open_requests_of_a_tenant_are_bounded(watch: Watch, rest: Address, mallory: str) -> None:
    """A thousand requests whose bodies do not arrive: those above the share are refused, the others time out."""
    with crowd(rest, 1000) as sockets:
        send_all(sockets, head("POST", KEYS, authorization=f"Bearer {mallory}", content_length=9))
        statuses = Counter(read_to_end(each)[9:12] for each in sockets)
    assert statuses[b"429"] and set(statuses) <= {b"429", b"408", b""}, statuses


def test_idle_connections_of_a_tenant_give_way_to_new_ones(watch: Watch, rest: Address, mallory: str) -> None:
    """The gateway's connections are all idle and have shown a key; each further connection closes the oldest."""
    with ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS + 100):
            each = stack.enter_context(socket.create_connection((rest.host, rest.port), HANG_S))
            each.sendall(head("GET", "/v1/none", authorization=f"Bearer {mallory}"))
            assert each.recv(1 << 16).startswith(b"HTTP/1.1 404")


def test_streams_that_nobody_reads_end(watch: Watch, rest: Address, mallory: str, glossary: str) -> None:
    """Twenty streams with many bytes, whose client reads none; a hundred would fill the worker that all share."""
    asked = {"model": glossary, "messages": [{"role": "user", "content": "?"}], "stream": True, "max_tokens": 320}
    body = json.dumps({**asked, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}).encode()
    sent = head("POST", TOKENS, authorization=f"Bearer {mallory}", content_length=len(body)) + body
    with crowd(rest, 20, receive_bytes=4096) as sockets:
        assert send_all(sockets, sent) == 20
        time.sleep(4 * SILENCE_S)  # the attack itself: nothing is read for longer than the gateway waits
        answers = [read_to_end(each) for each in sockets]
    assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
    assert not any(b"[DONE]" in answer for answer in answers), "their requests ended before they were answered"


@pytest.mark.parametrize("path", ["/v1/usage?group_by=day", "/v1/models", "/v1/keys", "/v1/bill", "/v1/prices"])
def test_queries_of_a_tenant_are_bounded(path: str, watch: Watch, platform: Platform, mallory: str) -> None:
    async def many() -> list[int]:
        async with httpx.AsyncClient(base_url=platform.http, headers=headers(mallory), timeout=HANG_S) as client:
            replies = await asyncio.gather(*(client.get(path) for _ in range(100)))
            return [reply.status_code for reply in replies]

    statuses = asyncio.run(many())
    assert set(statuses) <= {200, 429} and statuses.count(200) >= 8


def test_open_stream_of_a_revoked_key_runs_to_its_end(platform: Platform, victim: str) -> None:
    """Decided: a key is looked at when a request begins. Afterwards it begins none, on no connection."""
    with GatewayClient(platform.http, victim) as owner, httpx.Client(base_url=platform.http) as client:
        made = owner.call("POST", "/v1/keys", json={"name": "leaked"})
        body = {
            "model": "neighbour/glossary",
            "messages": [{"role": "user", "content": "What is a relay?"}],
            "stream": True,
            "max_tokens": 60,
        }
        with client.stream("POST", TOKENS, json=body, headers=headers(made["key"]), timeout=HANG_S) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            owner.call("DELETE", f"/v1/keys/{made['id']}")
            assert [line for line in lines if line][-1] == "data: [DONE]"
        wait_until(
            lambda: client.post(TOKENS, json=body, headers=headers(made["key"])).status_code == 401,
            "the refusal of the revoked key",
        )
