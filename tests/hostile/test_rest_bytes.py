"""Hostile bytes at the REST port, with a key and without: refused or bounded, while a neighbour's chats go on."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest

from tests.hostile.conftest import CONNECTIONS_PER_ADDRESS, Address
from tests.support.completions import headers
from tests.support.http import http
from tests.support.platform import Platform
from tests.support.raw_http import head
from tests.support.wait import HANG_S, wait_until
from torchrelay.cli.api.client import GatewayClient

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("watch")]

TOKENS, KEYS = "/v1/chat/completions", "/v1/keys"
HUGE = 50 << 20  # less than the ingress refuses
ATTACKERS = itertools.count(1)  # an address each
KEYED = head("POST", KEYS, authorization="KEY", transfer_encoding="chunked")
MB_20 = b"a" * 20_000_000
# What takes memory before it is refused; the unit tests of gateway/http have the rest.
CASES = {
    "body without a key": (head("POST", KEYS, content_length=HUGE) + MB_20, 401),
    "file without a key": (head("PUT", "/v1/uploads/upl-1/files/w", content_length=HUGE) + MB_20, 401),
    "chunks without a key": (head("POST", TOKENS, transfer_encoding="chunked") + b"1312d00\r\n" + MB_20, 401),
    "too long a body": (head("POST", TOKENS, authorization="KEY", content_length=HUGE) + MB_20, 413),
    "key of a megabyte": (head("POST", KEYS, authorization="Bearer " + "a" * (1 << 20)), 400),
    "chunk extension without end": (KEYED + b"5;" + b"x" * 200_000, 400),
    "trailers without end": (KEYED + b"0\r\n" + b"x: y\r\n" * 20_000, 400),
    "trailer without end": (KEYED + b"0\r\nx: " + b"y" * 200_000, 400),
    "header of 20 MB": (b"GET / HTTP/1.1\r\nx: " + MB_20, 400),
    "name of a header of 20 MB": (b"GET / HTTP/1.1\r\n" + MB_20, 400),
    "empty headers": (b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 200_000, 400),
    "URL of 20 MB": (b"GET /" + MB_20, 400),
    "query of 20 MB": (b"GET /?" + b"a=b&" * 5_000_000, 400),
    "method of 20 MB": (MB_20, 400),
}
ENDLESS = (
    b"GET / HTTP/1.1\r\nhost: x\r\n",
    b"G",
    head("POST", KEYS, authorization="KEY", content_length=5),
    head("POST", TOKENS, authorization="KEY", content_length=500) + b'{"m',
)


async def exchange(rest: Address, sent: bytes) -> bytes:
    """Sends until the gateway reads no further; returns what it answers until it ends the connection.

    On a bare socket: the kernel keeps the answer when sending fails, which a stream of asyncio forgets.
    """
    loop, answer = asyncio.get_running_loop(), bytearray()
    async with asyncio.timeout(HANG_S):
        with rest.connect() as sock:
            sock.setblocking(False)
            with suppress(ConnectionError):
                await loop.sock_sendall(sock, sent)
            with suppress(ConnectionError):
                while piece := await loop.sock_recv(sock, 1 << 16):
                    answer += piece
    return bytes(answer)


def with_key(sent: bytes, key: str) -> bytes:
    return sent.replace(b"authorization: KEY", f"authorization: Bearer {key}".encode())


def status_of(answer: bytes) -> int:
    """The status of an answer, whose error must have OpenAI's format unless it is about a malformed or late head."""
    lines, _, body = answer.partition(b"\r\n\r\n")
    status = int(lines.split()[1])
    assert (status in (400, 408) and b"html" in lines) or json.loads(body)["error"]["message"]
    return status


async def test_malformed_request_is_refused(rest: Address, mallory: str, subtests: pytest.Subtests) -> None:
    for case, (sent, status) in CASES.items():
        with subtests.test(case):
            assert status_of(await exchange(rest, with_key(sent, mallory))) == status


async def test_request_that_does_not_end_is_refused(rest: Address, mallory: str) -> None:
    answers = await asyncio.gather(*(exchange(rest, with_key(sent, mallory)) for sent in ENDLESS))
    assert [status_of(answer) for answer in answers] == [408] * len(ENDLESS)


async def test_silent_connection_is_closed(rest: Address) -> None:
    answers = await asyncio.gather(*(exchange(rest, sent) for sent in (b"", b"\r\n" * 20, b"\n")))
    assert answers[0] == b"" and {status_of(answer) for answer in answers[1:]} <= {400, 408}


@contextmanager
def crowd(rest: Address, size: int, receive_bytes: int = 0) -> Iterator[list[socket.socket]]:
    """Connections from as few new addresses as may open them at once. ``receive_bytes``: the receive buffer of each."""
    with ExitStack() as stack:
        sockets: list[socket.socket] = []
        for index in range(size):
            if index % CONNECTIONS_PER_ADDRESS == 0:
                number = next(ATTACKERS)
            sockets.append(stack.enter_context(rest.connect(number, receive_bytes)))
        for each in sockets:
            each.setblocking(False)
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


def begin_of_answer(sock: socket.socket) -> bytes:
    """The first bytes of the answer; none if the server has ended the connection."""
    sock.settimeout(HANG_S)
    try:
        return sock.recv(1 << 16)
    except ConnectionError:
        return b""


def await_closed(sockets: list[socket.socket]) -> None:
    """Until the server has ended all connections."""
    for each in sockets:
        read_to_end(each)


def test_idle_connections_end(rest: Address) -> None:
    with crowd(rest, 3000) as sockets:
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
def test_connections_that_send_and_wait_are_closed(sent: bytes, rest: Address) -> None:
    with crowd(rest, 1000) as sockets:
        for _ in range(4):
            send_all(sockets, sent)
        await_closed(sockets)


def test_connections_of_random_bytes_are_closed(rest: Address) -> None:
    dice = random.Random(7)
    starts = [b"", b"GET / HTTP/1.1\r\n", head("POST", KEYS, transfer_encoding="chunked")]
    for _ in range(10):
        with crowd(rest, 30) as sockets:
            for each in sockets:
                send_all([each], dice.choice(starts) + dice.randbytes(dice.randrange(1, 5000)))
            await_closed(sockets)


async def test_bodies_of_a_tenant_are_bounded_together(rest: Address, mallory: str) -> None:
    """Sixty bodies of 8 MiB each, all but their last byte; two fit into the tenant's share."""
    size = 8 << 20
    sent = head("POST", TOKENS, authorization=f"Bearer {mallory}", content_length=size) + bytes(size - 1)
    statuses = Counter(map(status_of, await asyncio.gather(*(exchange(rest, sent) for _ in range(60)))))
    assert statuses[429] >= 20 and statuses.keys() <= {408, 429}, statuses


def test_open_requests_of_a_tenant_are_bounded(rest: Address, mallory: str) -> None:
    """A thousand requests whose bodies stop: those above the share are refused, the others time out."""
    begun = head("POST", KEYS, authorization=f"Bearer {mallory}", content_length=40_000) + bytes(30_000)
    with crowd(rest, 1000) as sockets:
        send_all(sockets, begun)
        statuses = Counter(begin_of_answer(each)[9:12] for each in sockets)
    assert statuses[b"429"] and set(statuses) <= {b"429", b"408", b""}, statuses


def test_streams_that_nobody_reads_end(platform: Platform, rest: Address, mallory: str, glossary: str) -> None:
    """Twenty streams with many bytes, whose client reads none; a hundred would fill the worker that all share."""
    asked = {"model": glossary, "messages": [{"role": "user", "content": "?"}], "stream": True, "max_tokens": 320}
    body = json.dumps({**asked, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}).encode()
    sent = head("POST", TOKENS, authorization=f"Bearer {mallory}", content_length=len(body)) + body

    def num_settled() -> int:
        reply = http.get(f"{platform.http}/v1/usage", headers=headers(mallory), timeout=HANG_S)
        return int(reply.json()["total"]["requests"])

    before = num_settled()
    with crowd(rest, 20, receive_bytes=4096) as sockets:
        assert send_all(sockets, sent) == 20
        wait_until(lambda: num_settled() - before == 20, "the end of all generations")


async def test_queries_of_a_tenant_are_bounded(platform: Platform, mallory: str) -> None:
    paths = ("/v1/usage?group_by=day", "/v1/models", "/v1/keys", "/v1/invoices/2026-11", "/v1/prices")
    limits = httpx.Limits(max_connections=CONNECTIONS_PER_ADDRESS // 2)
    async with httpx.AsyncClient(
        base_url=platform.http, headers=headers(mallory), timeout=HANG_S, limits=limits
    ) as client:
        replies = await asyncio.gather(*(client.get(path) for path in paths * 20))
    statuses = Counter(reply.status_code for reply in replies)
    assert statuses.keys() <= {200, 429} and statuses[200] >= 8, statuses


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
