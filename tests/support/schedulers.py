"""Schedulers that share a lease, as parts of a platform: which of them is active."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.parts import Parts
from tests.support.wait import HANG_S
from torchrelay.common.net.rpc.channels import SCHEDULER_SERVICE, open_channel


def address_of(parts: Parts, scheduler: str) -> str:
    return f"127.0.0.1:{parts.setting(scheduler, 'PORT')}"


async def serves(parts: Parts, scheduler: str) -> bool:
    """Whether this scheduler is active; waits while it starts."""
    request = health_pb2.HealthCheckRequest(service=SCHEDULER_SERVICE)
    async with asyncio.timeout(HANG_S), open_channel(address_of(parts, scheduler)) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                status = (await stub.Check(request, timeout=1)).status
            except grpc.aio.AioRpcError:  # it starts, or is between standing by and serving
                await asyncio.sleep(0.05)
                continue
            return bool(status == health_pb2.HealthCheckResponse.SERVING)


async def becomes_active(parts: Parts, scheduler: str) -> None:
    async with asyncio.timeout(HANG_S):
        while True:
            if await serves(parts, scheduler):
                return
            await asyncio.sleep(0.05)
