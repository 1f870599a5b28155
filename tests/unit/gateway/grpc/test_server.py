"""The public gRPC server: its limits of metadata and messages, and the addresses that it listens on."""

from __future__ import annotations

import asyncio
import struct
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.http2_client import ACK, SETTINGS, http2_client
from tests.support.wait import HANG_S
from tests.unit.gateway.dialects.all_dialects import METADATA, inference_stub
from tests.unit.gateway.token_path_rig import MakeRig, TokenPathRig
from torchrelay.common.host.addresses import join_address
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.common.net.rpc.health import no_fault
from torchrelay.gateway.grpc.server import public_grpc_server
from torchrelay.gateway.settings import GatewaySettings
from torchrelay.inference.v1 import inference_pb2 as pb

CHECK = "/grpc.health.v1.Health/Check"


@pytest.mark.parametrize(("num_bytes", "is_read"), [(9_000, True), (100_000, False)])
async def test_metadata_above_the_limit_is_not_read(rig: TokenPathRig, num_bytes: int, is_read: bool) -> None:
    def attack() -> bytes:
        with http2_client(rig.grpc_address) as client:
            client.greet()
            client.open_call(1, CHECK, *[("x", "a" * 100)] * (num_bytes // 100))
            return client.end_of(1)

    assert (b"\x08\x01" in await asyncio.to_thread(attack)) is is_read  # SERVING


async def test_client_may_send_little_before_its_message_is_read(rig: TokenPathRig) -> None:
    def settings() -> dict[int, int]:
        with http2_client(rig.grpc_address) as client:
            client.greet()
            first = next(payload for kind, flags, _, payload in client.frames() if kind == SETTINGS and not flags & ACK)
            return dict(struct.iter_unpack(">HI", first))

    initial_window = 4
    assert (await asyncio.to_thread(settings)).get(initial_window, 65_535) <= 65_536


async def test_message_above_the_limit_is_refused(make_rig: MakeRig) -> None:
    rig = await make_rig(max_body_bytes=1 << 16)
    async with inference_stub(rig) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(pb.GenerateRequest(model="echo", prompt="a" * (1 << 17)), metadata=METADATA):
                pass
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(("host", "callers"), [("::1", ["::1"]), ("::", ["::1", "127.0.0.1"])])
async def test_ipv6_is_served(host: str, callers: list[str]) -> None:
    server = public_grpc_server(GatewaySettings(host=host), no_fault)
    await server.start()
    for caller in callers:
        async with open_channel(join_address(caller, server.port)) as channel:
            stub = cast(Any, health_pb2_grpc.HealthStub(channel))
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=HANG_S, wait_for_ready=True)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
    await server.stop(0)
