"""A gRPC server that strangers reach: connections, calls and messages are bounded in number, size and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.http2_client import Http2Client, http2_client
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.common.net.rpc.options import PublicLimits
from torchrelay.common.net.rpc.server import RpcServer

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
LIMITS = PublicLimits(connections=3, streams=5, message_bytes=1000, head_s=1.0, idle_s=2.0)


@pytest.fixture
async def server() -> AsyncIterator[RpcServer]:
    server = RpcServer("127.0.0.1", limits=LIMITS)
    await server.start()
    yield server
    await server.stop(0)


async def check(server: RpcServer, timeout_s: float = 10) -> int:
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        stub = cast(Any, health_pb2_grpc.HealthStub(channel))
        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True)
        return int(reply.status)


async def closed(server: RpcServer, *, greet: bool) -> bool:
    def attack() -> bool:
        with http2_client(f"127.0.0.1:{server.port}") as client:
            if greet:
                client.greet()
            return client.is_closed(20)

    return await asyncio.to_thread(attack)


@pytest.mark.parametrize("greet", [False, True])
async def test_a_silent_or_idle_connection_is_closed(server: RpcServer, greet: bool) -> None:
    assert await closed(server, greet=greet)


async def test_a_health_check_is_answered_without_its_message(server: RpcServer) -> None:
    def attack() -> bytes:
        with http2_client(f"127.0.0.1:{server.port}") as client:
            client.greet()
            client.open_call(1, CHECK)
            return client.end_of(1)

    serving = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING).SerializeToString()
    told = await asyncio.to_thread(attack)
    assert serving in told and b"did not arrive" not in told


async def test_watching_health_is_not_offered_to_strangers(server: RpcServer) -> None:
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        stub = cast(Any, health_pb2_grpc.HealthStub(channel))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Watch(health_pb2.HealthCheckRequest()):
                pass
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert await check(server) == health_pb2.HealthCheckResponse.SERVING


async def test_connections_beyond_the_limit_are_refused_until_one_ends(server: RpcServer) -> None:
    def attack() -> list[bool]:
        clients = [http2_client(f"127.0.0.1:{server.port}") for _ in range(6)]
        opened = [client.__enter__() for client in clients]
        try:
            return [_is_refused(client) for client in opened]
        finally:
            for client in clients:
                client.__exit__(None, None, None)

    assert (await asyncio.to_thread(attack)).count(True) >= 3
    assert await check(server) == health_pb2.HealthCheckResponse.SERVING


def _is_refused(client: Http2Client) -> bool:
    try:
        client.greet()
        next(client.frames())
    except (OSError, StopIteration):
        return True
    return False
