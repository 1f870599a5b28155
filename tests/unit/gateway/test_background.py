"""Tasks that run alongside a block or end together, and the lifetime of the parts of the token path."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from tests.support.brokers import free_port
from tests.support.echo_services import EchoScheduler
from tests.support.gateway_ports import InMemoryPorts
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.control.v1 import scheduler_pb2, types_pb2
from torchrelay.gateway.background import all_ended
from torchrelay.gateway.inference.core import RequestEvent
from torchrelay.gateway.limits.connection_shares import connection_shares
from torchrelay.gateway.settings import GatewaySettings
from torchrelay.gateway.thread_pool import batch_executor
from torchrelay.gateway.token_path import open_token_path


async def test_all_ended_waits_for_the_rest_after_a_failure() -> None:
    ended: list[str] = []

    async def fail(name: str) -> None:
        raise ValueError(name)

    async def end_later() -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        ended.append("later")

    with pytest.raises(ExceptionGroup) as caught:
        await all_ended(fail("first"), end_later(), fail("last"))
    assert ended == ["later"]
    assert [str(error) for error in caught.value.exceptions] == ["first", "last"]


async def test_all_ended_raises_nothing_on_success() -> None:
    ended: list[str] = []

    async def end(name: str) -> None:
        await asyncio.sleep(0)
        ended.append(name)

    await all_ended(end("first"), end("last"))
    assert ended == ["first", "last"]


def scheduling_policy() -> int:
    """The scheduling scheduling_policy of the calling thread; 0 is the default."""
    return os.sched_getscheduler(0) if sys.platform == "linux" else 0


def test_batch_threads_yield_the_core() -> None:
    with batch_executor(1, "side") as threads:
        assert threads.submit(scheduling_policy).result() == (os.SCHED_BATCH if sys.platform == "linux" else 0)
    assert scheduling_policy() == 0


async def test_fault_in_the_scheduler_stream_ends_the_gateway() -> None:
    settings, ports, there = GatewaySettings(), InMemoryPorts([]), EchoScheduler([])
    there.refusals.append(scheduler_pb2.Refusal())
    is_ended = False

    def fail(event: RequestEvent) -> None:
        raise ValueError("a fault")

    await there.start()
    try:
        with pytest.raises(ExceptionGroup) as raised:
            async with (
                open_channel(there.address) as scheduler,
                open_channel(f"127.0.0.1:{free_port()}") as store,
                open_token_path(
                    settings,
                    "gw",
                    keys=ports,
                    catalog=ports,
                    ledger=ports,
                    limits=ports,
                    shares=connection_shares(settings),
                    scheduler=scheduler,
                    store=store,
                ) as token_path,
            ):
                key = types_pb2.AttemptKey(request_id="r", attempt=1)
                token_path.admissions.admit(scheduler_pb2.AdmitRequest(key=key), fail)
                try:
                    await asyncio.wait_for(asyncio.Event().wait(), 20)
                except asyncio.CancelledError:
                    is_ended = True
                    raise
    finally:
        await there.stop()
    assert is_ended
    assert raised.group_contains(ValueError, match="a fault")
