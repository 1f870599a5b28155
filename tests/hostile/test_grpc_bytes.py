"""Hostile bytes at the gRPC port, with a key and without: refused or bounded, while a neighbour's chats go on."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import pytest

from tests.hostile.conftest import Address
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
    call_headers,
    frame,
    header_block,
    http2_client,
)
from tests.support.platform import Platform
from tests.support.wait import HANG_S, wait_until
from torchrelay.inference.v1 import inference_pb2 as pb
from torchrelay.inference.v1.inference_pb2_grpc import InferenceStub

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("watch")]

GENERATE, CHECK = "/torchrelay.inference.v1.Inference/Generate", "/grpc.health.v1.Health/Check"
GREETING = PREFACE + frame(SETTINGS)


def call(stream: int, *more: tuple[str, str], method: str = GENERATE) -> bytes:
    return frame(HEADERS, END_HEADERS, stream, header_block(call_headers(method, *more)))


@pytest.fixture(scope="package")
def endpoint(platform: Platform) -> Address:
    host, _, port = platform.endpoints["grpc"].rpartition(":")
    return Address(host, int(port))


FLOODS = {
    "pings": frame(PING, payload=bytes(8)) * 50_000,
    "headers of a stream that cannot be opened": frame(HEADERS, END_HEADERS, 2) * 50_000,
    "headers of one stream": frame(HEADERS, END_HEADERS, 1) * 50_000,
    "headers that say nothing": b"".join(frame(HEADERS, END_HEADERS, 2 * n + 1) for n in range(50_000)),
    "rapid resets": b"".join(call(2 * n + 1) + frame(RST_STREAM, 0, 2 * n + 1, bytes(4)) for n in range(10_000)),
    "continuations of nothing": (frame(HEADERS, 0, 2) + frame(CONTINUATION, END_HEADERS, 2)) * 25_000,
}


def test_connections_that_flood_frames_end(endpoint: Address, subtests: pytest.Subtests) -> None:
    with ExitStack() as stack:
        crowds = {case: stack.enter_context(crowd(endpoint, 20)) for case in FLOODS}
        for case, sockets in crowds.items():
            send_all(sockets, GREETING + FLOODS[case])
        for case, sockets in crowds.items():
            with subtests.test(case):
                await_closed(sockets)


def test_metadata_of_10_mb_ends_the_connection(endpoint: Address) -> None:
    block = header_block([*call_headers(GENERATE), ("x", "a" * 10_000_000)])
    pieces = [block[begin : begin + 16_384] for begin in range(0, len(block), 16_384)]
    with http2_client(f"{endpoint.host}:{endpoint.port}") as client:
        client.greet()
        client.sock.sendall(frame(HEADERS, 0, 1, pieces[0]))
        with pytest.raises(OSError):  # long before the last piece
            for piece in pieces[1:]:
                client.sock.sendall(frame(CONTINUATION, 0, 1, piece))


def test_keyless_calls_with_data_end_their_connections(endpoint: Address) -> None:
    sent = GREETING + b"".join(
        call(2 * n + 1, method=method) + frame(DATA, 0, 2 * n + 1, bytes(16_000))
        for n, method in enumerate((GENERATE, CHECK) * 2)
    )
    with crowd(endpoint, 300) as sockets:
        for _ in range(5):
            send_all(sockets, sent)
        await_closed(sockets)


def test_connections_with_unfinished_calls_end(endpoint: Address, mallory: str) -> None:
    sent = GREETING + b"".join(call(2 * n + 1, ("authorization", f"Bearer {mallory}")) for n in range(20))
    with crowd(endpoint, 100) as sockets:
        send_all(sockets, sent)
        await_closed(sockets)


def test_idle_connections_end(endpoint: Address) -> None:
    with crowd(endpoint, 3000) as sockets:
        await_closed(sockets)


def test_random_frames_end_their_connections(endpoint: Address) -> None:
    dice = random.Random(11)
    with crowd(endpoint, 200) as sockets:
        for each in sockets:
            frames = [
                frame(dice.randrange(12), dice.randrange(256), dice.randrange(8), dice.randbytes(dice.randrange(99)))
                for _ in range(20)
            ]
            send_all([each], GREETING + b"".join(frames))
        await_closed(sockets)


def test_large_calls_of_a_tenant_leave_others_served(platform: Platform, mallory: str) -> None:
    metadata = (("authorization", f"Bearer {mallory}"),)
    with grpc.insecure_channel(platform.endpoints["grpc"]) as channel, ThreadPoolExecutor(150) as threads:

        def ask(size: int) -> grpc.StatusCode:
            made = pb.GenerateRequest(model="neighbour/none", prompt="a" * size)
            try:
                list(InferenceStub(channel).Generate(made, metadata=metadata, timeout=HANG_S))
            except grpc.RpcError as error:
                code: grpc.StatusCode = error.code()
                return code
            return grpc.StatusCode.OK

        codes = set(threads.map(ask, [250_000, 1_000_000] * 75))
    # A message that waits for the tenant's others reaches the ingress's limit of pauses, or the gateway's of messages.
    late = {grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED}
    assert codes <= {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED} | late
    assert grpc.StatusCode.NOT_FOUND in codes


def test_answers_without_a_window_end_their_calls(
    platform: Platform, endpoint: Address, mallory: str, glossary: str
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
        reading.result()  # the ingress ends each call whose client takes nothing
