"""The history, published to a real broker that may be away."""

from __future__ import annotations

import asyncio
import json

import pytest
from nats.js.api import StreamConfig
from nats.js.errors import NoStreamResponseError

from torchrelay.common.ids import new_id
from torchrelay.common.net.nats_client import Subjects, connect, ensure_streams
from torchrelay.scheduler.policy.effects import SchedulerEvent
from torchrelay.scheduler.service.events.publisher import EventPublisher


async def test_publisher_drops_oldest_events_without_stream(nats_url: str) -> None:
    subjects = Subjects(new_id("t"))
    nats = await connect(nats_url, "test")
    try:
        js = nats.jetstream()
        history = EventPublisher(nats, subjects, max_queued=3)
        history.note(SchedulerEvent(1.0, "place", "m", "i", "not published"))
        for number in range(5):
            history.note(
                SchedulerEvent(float(number), "load", "m", "i", f"{number}", "instance.loading", {"n": number})
            )
        assert history.num_dropped == 2
        publishing = asyncio.create_task(history.run())
        with pytest.raises(NoStreamResponseError):
            await js.publish(subjects.event("x"), b"", timeout=1)  # nobody keeps it yet
        await ensure_streams(js, subjects)
        subscription = await js.subscribe(subjects.event(">"), stream=subjects.history_stream)
        numbers = [json.loads((await subscription.next_msg(timeout=5)).data)["n"] for _ in range(3)]
        assert numbers == [2, 3, 4]
        publishing.cancel()
        await asyncio.wait((publishing,))
    finally:
        await nats.close()


async def test_events_lost_inside_batch_are_sent_again(nats_url: str) -> None:
    """Only the first and the last event of a batch are acknowledged."""
    subjects = Subjects(new_id("t"))
    nats = await connect(nats_url, "test")
    try:
        js = nats.jetstream()
        some = StreamConfig(name=subjects.history_stream, subjects=[subjects.event("instance.*")])
        await js.add_stream(some)
        history = EventPublisher(nats, subjects)
        for number, topic in enumerate(("instance.a", "scale.up", "scale.down", "instance.b")):
            history.note(SchedulerEvent(float(number), "kind", "m", "i", "", topic, {"n": number}))
        publishing = asyncio.create_task(history.run())
        async with asyncio.timeout(10):
            while (await js.stream_info(subjects.history_stream)).state.messages < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await js.update_stream(some.evolve(subjects=[subjects.event(">")]))
            subscription = await js.subscribe(subjects.event(">"), stream=subjects.history_stream)
            numbers = [json.loads((await subscription.next_msg(timeout=5)).data)["n"] for _ in range(4)]
        assert sorted(numbers) == [0, 1, 2, 3], "each once"
        assert history.num_dropped == 0
        publishing.cancel()
        await asyncio.wait((publishing,))
    finally:
        await nats.close()
