from __future__ import annotations

import pytest

from tests.unit.gateway.scripted_services import serving_scheduler
from torchrelay.common.errors import NotFound, Unavailable
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.gateway.clients.scheduler import SchedulerClient


async def test_client_gets_largest_slot_and_explanations() -> None:
    async with serving_scheduler() as channel:
        client = SchedulerClient(channel, "127.0.0.1:1")
        assert await client.largest_slot_bytes() == 12345
        assert (await client.explain(request_id="req-1")).phases[0].name == "queue"
        with pytest.raises(NotFound):
            await client.explain(request_id="req-old")


async def test_largest_slot_is_zero_without_a_scheduler() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        client = SchedulerClient(channel, "127.0.0.1:1")
        assert await client.largest_slot_bytes(timeout_s=1) == 0
        with pytest.raises(Unavailable, match=r"the scheduler at 127.0.0.1:1 \(TORCHRELAY_SCHEDULER_ADDRESS\)"):
            await client.explain(request_id="req-1", timeout_s=1)
