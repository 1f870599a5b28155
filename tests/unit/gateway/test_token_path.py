"""The lifetime of the token path's parts."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.brokers import free_port
from tests.support.echo_services import EchoScheduler
from tests.support.gateway_ports import InMemoryPorts
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.control.v1 import scheduler_pb2, types_pb2
from torchrelay.gateway.inference.core import RequestEvent
from torchrelay.gateway.limits.connection_shares import connection_shares
from torchrelay.gateway.settings import GatewaySettings
from torchrelay.gateway.token_path import open_token_path


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
