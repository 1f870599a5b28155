"""The public gRPC server: connections, calls and messages are bounded in number, size and time."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.descriptors import open_descriptors
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
from tests.support.wait import HANG_S
from torchrelay.common.errors import Conflict, Unauthenticated, Unavailable
from torchrelay.common.host.addresses import join_address
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.gateway.edge.frame_limits import MAX_FRAME_BYTES
from torchrelay.gateway.edge.grpc_limits import GrpcLimits
from torchrelay.gateway.edge.grpc_server import PublicGrpcServer, show_key

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
LIMITS = GrpcLimits(connections=3, streams=5, message_bytes=1000, head_s=1.0, idle_s=2.0, silence_s=60.0)
PATIENT = replace(LIMITS, head_s=60.0, idle_s=60.0)


@pytest.fixture
async def server() -> AsyncIterator[PublicGrpcServer]:
    server = PublicGrpcServer("127.0.0.1", 0, LIMITS)
    await server.start()
    yield server
    await server.stop(0)


async def check(server: PublicGrpcServer, timeout_s: float = HANG_S, host: str = "127.0.0.1") -> int:
    async with open_channel(join_address(host, server.port)) as channel:
        stub = cast(Any, health_pb2_grpc.HealthStub(channel))
        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True)
        return int(reply.status)


GREETING = PREFACE + frame(SETTINGS)
CALL = header_block(call_headers(CHECK))
ENDS = {
    "silence": b"",
    "no call": GREETING,
    "no HTTP/2": b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" + b"x" * 1000,
    "the preface alone": PREFACE,
    "half a preface": PREFACE[:10],
    "a frame of 16 MB": GREETING + b"\xff\xff\xff" + frame(DATA, stream=1)[3:] + bytes(100_000),
    "data on a stream that is not open": GREETING + frame(DATA, stream=1, payload=bytes(1000)),
    "headers on stream 0": GREETING + frame(HEADERS, END_HEADERS, 0, CALL),
    "settings of the wrong size": GREETING + frame(SETTINGS, payload=bytes(5)),
    "a window of nothing": GREETING + frame(WINDOW_UPDATE, payload=bytes(4)),
    "a reset of stream 0": GREETING + frame(RST_STREAM, stream=0, payload=bytes(4)),
    "a ping of 7 bytes": GREETING + frame(PING, payload=bytes(7)),
    "a continuation of nothing": GREETING + frame(CONTINUATION, END_HEADERS, 1, b"\0\0\0"),
    "a bad header table": GREETING + frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f"),
}


async def test_silent_or_broken_connection_is_closed() -> None:
    def attack(address: str) -> list[str]:
        with ExitStack() as stack:
            clients = {case: stack.enter_context(http2_client(address)) for case in ENDS}
            for case, client in clients.items():
                with suppress(OSError):
                    client.sock.sendall(ENDS[case])
            return [case for case, client in clients.items() if not client.is_closed(HANG_S)]

    server = PublicGrpcServer("127.0.0.1", 0, replace(LIMITS, connections=100))
    await server.start()
    assert await asyncio.to_thread(attack, f"127.0.0.1:{server.port}") == []
    assert await check(server) == health_pb2.HealthCheckResponse.SERVING
    await server.stop(0)


@pytest.mark.parametrize(("num_bytes", "is_read"), [(9_000, True), (100_000, False)])
async def test_metadata_above_the_limit_is_not_read(server: PublicGrpcServer, num_bytes: int, is_read: bool) -> None:
    def attack() -> bytes:
        with http2_client(f"127.0.0.1:{server.port}") as client:
            client.greet()
            client.open_call(1, CHECK, *[("x", "a" * 100)] * (num_bytes // 100))
            return client.end_of(1)

    assert (b"\x08\x01" in await asyncio.to_thread(attack)) is is_read  # SERVING


async def test_grpcio_has_the_limits_of_the_port(server: PublicGrpcServer) -> None:
    """grpcio takes the first value of a repeated option, so the limits come before the options of every server."""

    def settings() -> dict[int, int]:
        with http2_client(f"127.0.0.1:{server.port}") as client:
            client.greet()
            first = next(payload for kind, flags, _, payload in client.frames() if kind == SETTINGS and not flags & ACK)
            return dict(struct.iter_unpack(">HI", first))

    initial_window, max_frame_size, announced = 4, 5, await asyncio.to_thread(settings)
    assert announced.get(initial_window, 65_535) <= 65_536
    assert announced.get(max_frame_size, MAX_FRAME_BYTES) == MAX_FRAME_BYTES
    options = LIMITS.options
    assert len(dict(options)) == len(options)
    assert dict(options)["grpc.max_receive_message_length"] == LIMITS.message_bytes


@pytest.mark.parametrize(("host", "callers"), [("::1", ["::1"]), ("::", ["::1", "127.0.0.1"])])
async def test_ipv6_is_served(host: str, callers: list[str]) -> None:
    server = PublicGrpcServer(host, 0, LIMITS)
    await server.start()
    for caller in callers:
        assert await check(server, host=caller) == health_pb2.HealthCheckResponse.SERVING
    await server.stop(0)


async def test_health_check_needs_no_message_and_other_methods_are_unimplemented(server: PublicGrpcServer) -> None:
    methods = (CHECK, WATCH, "/none/None", "/torchrelay.control.v1.Scheduler/Admit", "nonsense")

    def attack() -> list[bytes]:
        with http2_client(f"127.0.0.1:{server.port}") as client:
            client.greet()
            for number, method in enumerate(methods):
                client.open_call(2 * number + 1, method)
            ends = client.ends_of({2 * number + 1 for number in range(len(methods))})
            return [ends[2 * number + 1] for number in range(len(methods))]

    health, *others = await asyncio.to_thread(attack)
    assert b"\x08\x01" in health and b"did not arrive" not in health  # SERVING
    assert all(others) and not any(b"\x08\x01" in end for end in others)
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        stub = cast(Any, health_pb2_grpc.HealthStub(channel))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Watch(health_pb2.HealthCheckRequest()):
                pass
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert await check(server) == health_pb2.HealthCheckResponse.SERVING


async def test_oldest_keyless_connections_above_the_limit_are_closed() -> None:
    def attack(address: str) -> None:
        with ExitStack() as stack:
            clients = [stack.enter_context(http2_client(address)) for _ in range(6)]
            assert all(client.is_closed(HANG_S) for client in clients[:3])
            for client in clients[3:]:
                client.greet()
                next(client.frames())

    server = PublicGrpcServer("127.0.0.1", 0, PATIENT)
    await server.start()
    await asyncio.to_thread(attack, f"127.0.0.1:{server.port}")
    assert await check(server) == health_pb2.HealthCheckResponse.SERVING
    await server.stop(0)


async def test_connection_with_a_key_survives_keyless_clients() -> None:
    """Keyless clients call and are refused, or stay silent; all have the same address."""

    async def answer(message: bytes, _context: object) -> bytes:
        if message == b"keyless":
            raise Unauthenticated("no key")
        show_key("acme")
        return message

    server = PublicGrpcServer("127.0.0.1", 0, PATIENT)
    handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(answer)
    server.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", {"Unary": handler}),))
    await server.start()
    address = f"127.0.0.1:{server.port}"
    local = [("grpc.use_local_subchannel_pool", 1)]
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, 0)
        tenant, *keyless = [
            await stack.enter_async_context(grpc.aio.insecure_channel(address, options=local)) for _ in range(5)
        ]
        call: Any = tenant.unary_unary("/test.Echo/Unary")
        assert await call(b"tenant", timeout=HANG_S) == b"tenant"
        for channel in keyless:
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cast(Any, channel.unary_unary("/test.Echo/Unary"))(b"keyless", timeout=HANG_S)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert tenant.get_state() == grpc.ChannelConnectivity.READY
        assert await call(b"tenant", timeout=20, wait_for_ready=False) == b"tenant"


async def test_taken_port_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(Conflict, match="another process"):
        PublicGrpcServer("127.0.0.1", taken.getsockname()[1], LIMITS)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    class TakenFolder(tempfile.TemporaryDirectory[str]):
        def __enter__(self) -> str:
            path = super().__enter__()
            Path(path, "socket").mkdir()
            return path

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "TemporaryDirectory", TakenFolder)
    with pytest.raises(Unavailable, match=r"cannot listen on unix:.*"):
        PublicGrpcServer("127.0.0.1", port, LIMITS)
    assert open_descriptors(str(tmp_path)) == set()
    assert os.listdir(tmp_path) == []
    with socket.create_server(("127.0.0.1", port)):  # the port is free again
        pass


def test_uncreatable_socket_folder_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    monkeypatch.setattr(tempfile, "tempdir", str(absent))
    before = open_descriptors("socket:")
    with pytest.raises(Unavailable, match=f"No such file or directory: '{absent}"):
        PublicGrpcServer("127.0.0.1", 0, LIMITS)
    assert open_descriptors("socket:") - before == set()
