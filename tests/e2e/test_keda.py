"""A platform whose only worker runs while KEDA's protocol asks for it; its client goes on with the next scheduler."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.e2e.tenants import Tenant
from tests.support.completions import complete
from tests.support.parts import Parts, parts_of
from tests.support.scheduler import watch
from tests.support.schedulers import address_of, becomes_active, serves
from tests.support.wait import HANG_S, eventually
from torchrelay.cli.up.plan import UpOptions
from torchrelay.control.v1 import external_scaler_pb2 as pb
from torchrelay.control.v1 import external_scaler_pb2_grpc

pytestmark = pytest.mark.e2e
OPTIONS = UpOptions(
    num_prefill_workers=0,
    num_decode_workers=0,
    num_both_workers=1,
    arena_bytes=256 << 20,
    kv_pool_bytes=32 << 20,
    threads=1,
    idle_timeout_s=1.0,
    pool_mode="follow",
)
SCHEDULERS = ("scheduler", "scheduler-1")
NUM_TOKENS = 8
WORKERS = pb.ScaledObjectRef(name="worker", namespace="models", scaler_metadata={"numDevices": "1"})
# KEDA's own: it calls all addresses in turn that accept connections.
IN_TURN = [
    ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


@pytest.fixture
async def parts(tmp_path: Path) -> AsyncIterator[Parts]:
    """A platform without a worker, and with two schedulers, of which the first is active."""
    async with parts_of(tmp_path / "home", OPTIONS) as parts:
        parts.set("scheduler", LEASE_S="1.5", KEDA_PORT=str(parts.ports.free()))
        parts.copy("scheduler-1", "scheduler", "PORT", "KEDA_PORT")
        parts.set("gateway", SCHEDULER_ADDRESS=",".join(address_of(parts, name) for name in SCHEDULERS))
        await parts.start("param-store", "scheduler", "gateway")
        await parts.start("scheduler-1", is_awaited=False)
        assert not await serves(parts, "scheduler-1")
        yield parts


async def pushed(stream: Any, value: bool) -> None:
    """Reads the stream up to this value."""
    async with asyncio.timeout(HANG_S):
        while (await stream.read()).result is not value:
            pass


async def num_wanted(keda: Any) -> int:
    request = pb.GetMetricsRequest(scaled_object_ref=WORKERS, metric_name="slots-wanted")
    (value,) = (await keda.GetMetrics(request, timeout=HANG_S)).metric_values
    return int(value.metric_value)


async def test_worker_runs_only_while_keda_is_asked_for_it(parts: Parts, tmp_path: Path) -> None:
    platform = parts.platform("gateway")
    tenant = Tenant(platform, "acme", await asyncio.to_thread(platform.tenant, "acme"), tmp_path)
    model = await asyncio.to_thread(tenant.model)
    targets = ",".join(f"127.0.0.1:{parts.setting(name, 'KEDA_PORT')}" for name in SCHEDULERS)
    addresses = ",".join(address_of(parts, name) for name in SCHEDULERS)

    def answer() -> int:
        return len(complete(platform, tenant.key, model, list(range(30, 60)), max_tokens=NUM_TOKENS)["choices"])

    def wanted_by_view() -> list[tuple[int, int]]:
        view = next(watch(addresses, token=parts.setting("gateway", "SCHEDULER_TOKEN")))
        return [(pool.num_devices, pool.num_wanted) for pool in view.pools]

    async with grpc.aio.insecure_channel(f"ipv4:{targets}", options=IN_TURN) as channel:
        keda: Any = external_scaler_pb2_grpc.ExternalScalerStub(channel)

        async def scales_once() -> None:
            stream = keda.StreamIsActive(WORKERS)
            await pushed(stream, False)
            for _ in range(4):  # whichever of the schedulers is next
                assert not (await keda.IsActive(WORKERS, timeout=HANG_S)).result and await num_wanted(keda) == 0
            answering = asyncio.create_task(asyncio.to_thread(answer))
            await pushed(stream, True)
            assert await asyncio.to_thread(wanted_by_view) == [(1, await num_wanted(keda))] == [(1, 1)]
            await parts.start("worker-0")
            assert await answering == 1
            await pushed(stream, False)  # the model is unused for its timeout
            await parts.leave("worker-0")
            stream.cancel()

        await scales_once()
        await parts.kill("scheduler")
        await becomes_active(parts, "scheduler-1")

        async def answers() -> bool:
            try:
                return not (await keda.IsActive(WORKERS, timeout=HANG_S)).result
            except grpc.aio.AioRpcError as error:
                assert error.code() == grpc.StatusCode.UNAVAILABLE
                return False

        await eventually(answers, "the answer of the next scheduler")
        await scales_once()
