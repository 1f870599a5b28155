from __future__ import annotations

import pytest

from tests.unit.gateway.scripted_services import serving_scheduler
from torchrelay.common.errors import InvalidRequest, NotFound, Unavailable
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.gateway.clients.scheduler import SchedulerClient, Slots


async def test_client_gets_slots_and_explanations() -> None:
    async with serving_scheduler() as channel:
        client = SchedulerClient(channel, "127.0.0.1:1")
        slots = await client.slots()
        assert slots == Slots(12345, frozenset(("torchrelay",)))
        for engine in ("auto", "torchrelay"):
            slots.check_engine(engine)
        with pytest.raises(InvalidRequest, match=r"^no worker has the engine vllm; the workers have torchrelay$"):
            slots.check_engine("vllm")
        assert (await client.explain(request_id="req-1")).phases[0].name == "queue"
        with pytest.raises(NotFound):
            await client.explain(request_id="req-old")


async def test_no_slots_are_known_without_a_scheduler() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        client = SchedulerClient(channel, "127.0.0.1:1")
        slots = await client.slots(timeout_s=1)
        assert slots == Slots()
        slots.check_engine("vllm")
        with pytest.raises(Unavailable, match=r"the scheduler at 127.0.0.1:1 \(TORCHRELAY_SCHEDULER_ADDRESS\)"):
            await client.explain(request_id="req-1", timeout_s=1)
