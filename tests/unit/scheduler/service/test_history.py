"""The history, published to a real broker that may be away, and read back."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from nats.aio.client import Client
from nats.js.api import StreamConfig
from nats.js.errors import NoStreamResponseError

from torchrelay.common.errors import InvalidRequest, Overloaded, Unavailable
from torchrelay.common.ids import new_id
from torchrelay.common.net.nats_client import Subjects, connect, ensure_streams
from torchrelay.control.v1.scheduler_pb2 import Event
from torchrelay.scheduler.policy.effects import SchedulerEvent
from torchrelay.scheduler.service.history import EventPublisher, EventReader

FIRST_EVENT_US = 1


@asynccontextmanager
async def publishing(history: EventPublisher) -> AsyncIterator[None]:
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(history.run())
        yield
        task.cancel()


class Kept:
    """A stream of its own, one that writes to it and one that reads it."""

    def __init__(self, nats: Client) -> None:
        self.subjects, self.js = Subjects(new_id("t")), nats.jetstream()
        self._history = EventPublisher(nats, self.subjects)
        self.past = EventReader(self.js, self.subjects)

    async def num_kept(self) -> int:
        return (await self.js.stream_info(self.subjects.history_stream)).state.messages

    async def write(self, *kinds: str, reason: str = "because") -> None:
        for kind in kinds:
            fields = {"took_s": 1.5}
            self._history.note(SchedulerEvent(10.0, "kind", "acme/tiny", "it", reason, kind, fields, {"store-a": 3}))
        num_written = await self.num_kept() + len(kinds)
        async with publishing(self._history):
            while await self.num_kept() < num_written:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def readers(self, count: int = 1) -> list[str]:
        """Once there are so many."""
        while len(consumers := await self.js.consumers_info(self.subjects.history_stream)) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        return [info.name for info in consumers]

    async def read(self, kinds: Sequence[str] = (), since_us: int = FIRST_EVENT_US, after: int = 0) -> list[Event]:
        return [event async for event in self.past.events(kinds, since_us, after, False)]


@pytest.fixture
async def nats(nats_url: str) -> AsyncIterator[Client]:
    nats = await connect(nats_url, "test")
    yield nats
    await nats.close()


@pytest.fixture
async def it(nats: Client) -> Kept:
    it = Kept(nats)
    await ensure_streams(it.js, it.subjects)
    return it


async def test_reader_returns_events_whole_in_order(it: Kept) -> None:
    assert await it.read() == []
    await it.write("relay.started", "instance.ready", "relay.finished")
    first, second, third = await it.read()
    assert [event.kind for event in (first, second, third)] == ["relay.started", "instance.ready", "relay.finished"]
    assert first == Event(
        sequence=1,
        at_unix_us=10_000_000,
        kind="relay.started",
        model="acme/tiny",
        reason="because",
        fields_json='{"took_s": 1.5, "brought": {"store-a": 3}}',
    )
    assert [event.sequence for event in await it.read(after=first.sequence)] == [2, 3]


async def test_reader_returns_more_than_one_batch(it: Kept) -> None:
    await it.write(*["relay.started"] * 230)
    assert [event.sequence for event in await it.read()] == list(range(1, 231))


async def test_reader_filters_by_kind_and_time(it: Kept) -> None:
    await it.write("relay.started", "instance.ready", "scale.up")
    assert [event.kind for event in await it.read(["relay"])] == ["relay.started"]
    assert [event.kind for event in await it.read(["scale", "instance"])] == ["instance.ready", "scale.up"]
    assert await it.read(["model"]) == []
    later_us = int((time.time() + 60) * 1e6)
    assert await it.read(since_us=later_us) == [] and await it.read(since_us=0) == []
    with pytest.raises(InvalidRequest, match=r"'relay\.>' is not an event kind"):
        await it.read(["relay.>"])


async def test_following_reader_receives_new_events(it: Kept) -> None:
    async with asyncio.timeout(10):
        await it.write("relay.started")
        following = it.past.events(["relay"], FIRST_EVENT_US, 0, True)
        assert (await anext(following)).kind == "relay.started"
        only_new = it.past.events([], 0, 0, True)
        waiting = asyncio.ensure_future(anext(only_new))
        await it.readers(2)
        await it.write("scale.up", "relay.finished")
        assert (await anext(following)).kind == "relay.finished"
        assert (await waiting).kind == "scale.up"
        await following.aclose()
        await only_new.aclose()


@pytest.mark.parametrize("has_received", [True, False])
async def test_removed_consumer_resumes_without_loss(it: Kept, has_received: bool) -> None:
    async with asyncio.timeout(10):
        following = it.past.events([], 0, 0, True)
        hearing = asyncio.ensure_future(anext(following))
        await it.readers()
        if has_received:
            await it.write("relay.started")
            assert (await hearing).kind == "relay.started"
            hearing = asyncio.ensure_future(anext(following))
        for reader in await it.readers():
            await it.js.delete_consumer(it.subjects.history_stream, reader)
        await it.write("relay.finished")
        assert (await hearing).kind == "relay.finished"
        await following.aclose()


async def test_cancelled_reader_frees_its_place(it: Kept) -> None:
    following = asyncio.ensure_future(anext(it.past.events([], 0, 0, True)))
    await it.readers()
    following.cancel()
    await asyncio.wait((following,), timeout=10)
    assert following.cancelled()


async def test_reader_cancelled_during_setup_frees_its_place(it: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    js, begun = it.js, asyncio.Event()
    inner = js.pull_subscribe

    async def deaf(*args: Any, **named: Any) -> Any:
        with suppress(asyncio.CancelledError):
            begun.set()
            await asyncio.Event().wait()
        return await inner(*args, **named)

    monkeypatch.setattr(js, "pull_subscribe", deaf)
    following = asyncio.ensure_future(anext(it.past.events([], 0, 0, True)))
    await begun.wait()
    following.cancel()
    await asyncio.wait((following,), timeout=10)
    assert following.cancelled()


async def test_unreadable_events_are_skipped(it: Kept) -> None:
    for damaged in (b"no json", b"[]", b'{"at_unix_us": "soon"}'):
        await it.js.publish(it.subjects.event("relay.started"), damaged)
    await it.write("relay.finished")
    assert [event.kind for event in await it.read()] == ["relay.finished"]


async def test_missing_stream_is_unavailable(nats: Client) -> None:
    with pytest.raises(Unavailable, match="cannot be read"):
        await Kept(nats).read()


@pytest.mark.parametrize("since_us", [-1, 1 << 60])
async def test_invalid_time_is_refused(it: Kept, since_us: int) -> None:
    with pytest.raises(InvalidRequest, match="not a time") as caught:
        await it.read(since_us=since_us)
    assert caught.value.field == "since_unix_us"


async def test_readers_beyond_maximum_are_refused(it: Kept) -> None:
    it.past = EventReader(it.js, it.subjects, max_readers=1)
    await it.write("relay.started")
    first = it.past.events((), FIRST_EVENT_US, 0, True)
    assert (await anext(first)).kind == "relay.started"
    with pytest.raises(Overloaded):
        await it.read()
    await first.aclose()
    assert len(await it.read()) == 1


async def numbers(it: Kept, count: int) -> list[int]:
    """The numbers in the first events of the stream."""
    subscription = await it.js.subscribe(it.subjects.event(">"), stream=it.subjects.history_stream)
    return [json.loads((await subscription.next_msg(timeout=5)).data)["n"] for _ in range(count)]


async def test_publisher_drops_oldest_events_without_stream(nats: Client) -> None:
    it = Kept(nats)
    history = EventPublisher(nats, it.subjects, max_queued=3)
    history.note(SchedulerEvent(1.0, "place", "m", "i", "not published"))
    for number in range(5):
        history.note(SchedulerEvent(float(number), "load", "m", "i", f"{number}", "instance.loading", {"n": number}))
    assert history.num_dropped == 2
    async with publishing(history):
        with pytest.raises(NoStreamResponseError):
            await it.js.publish(it.subjects.event("x"), b"", timeout=1)  # nobody keeps it yet
        await ensure_streams(it.js, it.subjects)
        assert await numbers(it, 3) == [2, 3, 4]


async def test_events_lost_inside_batch_are_sent_again(nats: Client) -> None:
    """Only the first and the last event of a batch are acknowledged."""
    it = Kept(nats)
    some = StreamConfig(name=it.subjects.history_stream, subjects=[it.subjects.event("instance.*")])
    await it.js.add_stream(some)
    history = EventPublisher(nats, it.subjects)
    for number, topic in enumerate(("instance.a", "scale.up", "scale.down", "instance.b")):
        history.note(SchedulerEvent(float(number), "kind", "m", "i", "", topic, {"n": number}))
    async with publishing(history):
        while await it.num_kept() < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await it.js.update_stream(some.evolve(subjects=[it.subjects.event(">")]))
        assert sorted(await numbers(it, 4)) == [0, 1, 2, 3], "each once"
        assert history.num_dropped == 0
