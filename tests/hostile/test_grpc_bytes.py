"""Hostile bytes at the gRPC port, with a key and without: refused or bounded, while a neighbour's chats go on."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product

import grpc
import pytest

from tests.hostile.conftest import SILENCE_S, Address, Watch
from tests.hostile.test_rest_bytes import await_closed, crowd, send_all
from tests.support.completions import headers
from tests.support.http import http
from tests.support.http2_client import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    call_headers,
    frame,
    header_block,
    http2_client,
)
from tests.support.platform import Platform
from tests.support.wait import HANG_S, wait_until
from torchrelay.inference.v1 import inference_pb2 as pb
from torchrelay.inference.v1.inference_pb2_grpc import InferenceStub

pytestmark = pytest.mark.e2e

GENERATE, LIST = "/torchrelay.inference.v1.Inference/Generate", "/torchrelay.inference.v1.Inference/ListModels"
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
GREETING = PREFACE + frame(SETTINGS)


def call(stream: int, method: str = GENERATE, *more: tuple[str, str]) -> bytes:
    return frame(HEADERS, END_HEADERS, stream, header_block(call_headers(method, *more)))


@pytest.fixture(scope="package")
def endpoint(platform: Platform) -> Address:
    host, _, port = platform.endpoints["grpc"].rpartition(":")
    return Address(host, int(port))


def test_key_is_checked_before_the_message(watch: Watch, endpoint: Address, subtests: pytest.Subtests) -> None:
    for method, key in product((GENERATE, LIST), ("", "Bearer tr-nobody", "Basic abc", "Bearer \x7f\xff")):
        with subtests.test(f"{method}, {key!r}"), http2_client(f"{endpoint.host}:{endpoint.port}") as client:
            client.greet()
            client.open_call(1, method, *([("authorization", key)] if key else []))
            told = client.end_of(1)
            assert told, "the call or the connection ends"
            if key.isprintable() and key.isascii():
                assert b"invalid_api_key" in told


@pytest.mark.parametrize("method", [GENERATE, LIST])
def test_missing_message_ends_its_call(method: str, watch: Watch, endpoint: Address, mallory: str) -> None:
    with http2_client(f"{endpoint.host}:{endpoint.port}") as client:
        client.greet()
        client.open_call(1, method, ("authorization", f"Bearer {mallory}"))
        assert b"the message did not arrive within" in client.end_of(1)


def test_health_check_needs_no_message(watch: Watch, endpoint: Address) -> None:
    with http2_client(f"{endpoint.host}:{endpoint.port}") as client:
        client.greet()
        client.open_call(1, CHECK)
        assert b"\x08\x01" in client.end_of(1)  # SERVING


def test_unknown_methods_end(watch: Watch, endpoint: Address, subtests: pytest.Subtests) -> None:
    for method in (WATCH, "/none/None", "/torchrelay.control.v1.Scheduler/Admit", "nonsense"):
        with subtests.test(method), http2_client(f"{endpoint.host}:{endpoint.port}") as client:
            client.greet()
            client.open_call(1, method)
            assert client.end_of(1)


ENDS = {
    "silence": b"",
    "no HTTP/2": b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" + b"x" * 1000,
    "the preface alone": PREFACE,
    "half a preface": PREFACE[:10],
    "a frame of 16 MB": GREETING + b"\xff\xff\xff" + frame(DATA, stream=1)[3:] + bytes(100_000),
    "data on a stream that is not open": GREETING + frame(DATA, stream=1, payload=bytes(1000)),
    "headers on stream 0": GREETING + frame(HEADERS, END_HEADERS, 0, header_block(call_headers(GENERATE))),
    "settings of the wrong size": GREETING + frame(SETTINGS, payload=bytes(5)),
    "a window of nothing": GREETING + frame(WINDOW_UPDATE, payload=bytes(4)),
    "a reset of stream 0": GREETING + frame(RST_STREAM, stream=0, payload=bytes(4)),
    "a ping of 7 bytes": GREETING + frame(PING, payload=bytes(7)),
    "a continuation of nothing": GREETING + frame(CONTINUATION, END_HEADERS, 1, b"\0\0\0"),
    "a bad header table": GREETING + frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f"),
}


def test_broken_connection_ends(watch: Watch, endpoint: Address, subtests: pytest.Subtests) -> None:
    with ExitStack() as stack:
        crowds = {case: stack.enter_context(crowd(endpoint, 20)) for case in ENDS}
        for case, sockets in crowds.items():
            send_all(sockets, ENDS[case])
        for case, sockets in crowds.items():
            with subtests.test(case):
                await_closed(sockets)


FLOODS = {
    "pings": frame(PING, payload=bytes(8)) * 50_000,
    "headers of a stream that cannot be opened": frame(HEADERS, END_HEADERS, 2) * 50_000,
    "headers of one stream": frame(HEADERS, END_HEADERS, 1) * 50_000,
    "headers that say nothing": b"".join(frame(HEADERS, END_HEADERS, 2 * n + 1) for n in range(50_000)),
    "continuations of nothing": (frame(HEADERS, 0, 2) + frame(CONTINUATION, END_HEADERS, 2)) * 25_000,
}


@pytest.mark.parametrize("case", FLOODS)
def test_connections_that_flood_frames_end(case: str, watch: Watch, endpoint: Address) -> None:
    with crowd(endpoint, 20) as sockets:
        send_all(sockets, GREETING + FLOODS[case])
        await_closed(sockets)


def test_metadata_of_10_mb_ends_the_connection(watch: Watch, endpoint: Address) -> None:
    block = header_block([*call_headers(GENERATE), ("x", "a" * 10_000_000)])
    pieces = [block[begin : begin + 16_384] for begin in range(0, len(block), 16_384)]
    with http2_client(f"{endpoint.host}:{endpoint.port}") as client:
        client.greet()
        client.sock.sendall(frame(HEADERS, 0, 1, pieces[0]))
        with pytest.raises(OSError):  # long before the last piece
            for piece in pieces[1:]:
                client.sock.sendall(frame(CONTINUATION, 0, 1, piece))


@pytest.mark.parametrize(("num_bytes", "is_read"), [(9_000, True), (100_000, False)])
def test_metadata_above_the_limit_is_not_read(num_bytes: int, is_read: bool, watch: Watch, endpoint: Address) -> None:
    with http2_client(f"{endpoint.host}:{endpoint.port}") as client:
        client.greet()
        client.open_call(1, GENERATE, ("authorization", "Bearer x"), *[("x", "a" * 100)] * (num_bytes // 100))
        assert (b"invalid_api_key" in client.end_of(1)) is is_read


@pytest.mark.parametrize("acknowledges", [False, True])
def test_headers_without_end_end_the_connection(acknowledges: bool, watch: Watch, endpoint: Address) -> None:
    with http2_client(f"{endpoint.host}:{endpoint.port}") as client:
        client.greet()
        if acknowledges:
            client.sock.sendall(frame(SETTINGS, ACK))
        client.sock.sendall(frame(HEADERS, 0, 1, header_block(call_headers(GENERATE))))
        with pytest.raises(OSError):
            while True:
                client.sock.sendall(frame(CONTINUATION, 0, 1, header_block([("x", "a" * 1000)])))


def test_rapid_resets_end_the_connection(watch: Watch, endpoint: Address) -> None:
    with http2_client(f"{endpoint.host}:{endpoint.port}") as client:
        client.greet()
        with pytest.raises(OSError):
            for stream in range(1, 20_001, 2):
                client.sock.sendall(call(stream) + frame(RST_STREAM, 0, stream, bytes(4)))


def test_keyless_calls_with_data_end_their_connections(watch: Watch, endpoint: Address) -> None:
    sent = GREETING + b"".join(call(2 * n + 1) + frame(DATA, 0, 2 * n + 1, bytes(16_000)) for n in range(4))
    with crowd(endpoint, 300) as sockets:
        for _ in range(5):
            send_all(sockets, sent)
        await_closed(sockets)


def test_connections_with_unfinished_calls_end(watch: Watch, endpoint: Address, mallory: str) -> None:
    sent = GREETING + b"".join(call(2 * n + 1, GENERATE, ("authorization", f"Bearer {mallory}")) for n in range(20))
    with crowd(endpoint, 100) as sockets:
        send_all(sockets, sent)
        await_closed(sockets)


def test_ten_thousand_idle_connections_end(watch: Watch, endpoint: Address) -> None:
    with crowd(endpoint, 10_000) as sockets:
        await_closed(sockets)


def test_random_frames_end_their_connections(watch: Watch, endpoint: Address) -> None:
    dice = random.Random(11)
    with crowd(endpoint, 200) as sockets:
        for each in sockets:
            frames = [
                frame(dice.randrange(12), dice.randrange(256), dice.randrange(8), dice.randbytes(dice.randrange(99)))
                for _ in range(20)
            ]
            send_all([each], GREETING + b"".join(frames))
        await_closed(sockets)


def test_message_above_the_limit_is_refused(watch: Watch, platform: Platform, mallory: str) -> None:
    with grpc.insecure_channel(platform.endpoints["grpc"]) as channel:
        made = pb.GenerateRequest(model="x", prompt="a" * (9 << 20))
        with pytest.raises(grpc.RpcError) as caught:
            list(InferenceStub(channel).Generate(made, metadata=(("authorization", f"Bearer {mallory}"),)))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("size", [250_000, 1_000_000])
def test_large_calls_of_a_tenant_leave_others_served(size: int, watch: Watch, platform: Platform, mallory: str) -> None:
    made = pb.GenerateRequest(model="neighbour/none", prompt="a" * size)
    metadata = (("authorization", f"Bearer {mallory}"),)
    with grpc.insecure_channel(platform.endpoints["grpc"]) as channel, ThreadPoolExecutor(150) as threads:

        def ask(_: int) -> grpc.StatusCode:
            try:
                list(InferenceStub(channel).Generate(made, metadata=metadata, timeout=HANG_S))
            except grpc.RpcError as error:
                code: grpc.StatusCode = error.code()
                return code
            return grpc.StatusCode.OK

        codes = set(threads.map(ask, range(150)))
    assert codes <= {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED}


def test_answers_without_a_window_end_their_calls(
    watch: Watch, platform: Platform, endpoint: Address, mallory: str, glossary: str
) -> None:
    """A hundred calls whose client reads the connection and opens the window of no call."""
    made = pb.GenerateRequest(model=glossary, prompt="What is a relay?", max_tokens=64).SerializeToString()
    calls = range(1, 201, 2)

    def num_settled() -> int:
        reply = http.get(f"{platform.http}/v1/usage", headers=headers(mallory), timeout=HANG_S)
        return int(reply.json()["total"]["requests"])

    before = num_settled()
    with http2_client(f"{endpoint.host}:{endpoint.port}") as client, ThreadPoolExecutor(1) as threads:
        client.greet(window=0)
        next(frame for frame in client.frames() if frame[:2] == (SETTINGS, ACK))  # else it is closed for its silence
        for stream in calls:
            client.open_call(stream, GENERATE, ("authorization", f"Bearer {mallory}"))
            client.send_message(stream, made)
        reading = threads.submit(client.ends_of, set(calls))  # which answers the gateway's pings
        wait_until(lambda: num_settled() - before == len(calls), "the end of all generations")
        # The attack itself: nothing is taken for longer than the gateway waits, and the connection, without a call by
        # then, is not yet closed as idle.
        time.sleep(2 * SILENCE_S)
        for stream in calls:
            client.widen(stream, 1 << 20)
        received = b"".join(reading.result().values())
    assert received.count(b"nothing of the answer was taken") == len(calls)
