"""The Admit streams of gateways: bounded, and replaced by newer ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from torchrelay.common.errors import Overloaded
from torchrelay.common.net.rpc.message_pace import AT_ONCE
from torchrelay.control.v1.scheduler_pb2 import AdmitEvent, AdmitEvents, Refusal
from torchrelay.scheduler.service.admit_streams import MAX_BATCH, AdmitStreams


async def test_slow_gateway_loses_stream() -> None:
    streams = AdmitStreams(max_queued=3)
    stream = streams.open()
    streams.connected(stream, "g")
    for _ in range(4):
        streams.send("g", AdmitEvent())
    with pytest.raises(Overloaded):
        async for _ in stream.events():
            pass


async def test_newer_stream_replaces_older() -> None:
    streams = AdmitStreams(max_queued=3)
    older, newer = streams.open(), streams.open()
    streams.connected(older, "g")
    streams.connected(newer, "g")
    assert [event async for event in older.events()] == []
    assert not streams.disconnected(older)  # the gateway is still here
    streams.send("g", AdmitEvent())
    streams.close()
    assert [events async for events in newer.events()] == [AdmitEvents(events=[AdmitEvent()])]
    assert streams.disconnected(newer)


async def test_stream_beats_at_requested_interval() -> None:
    streams = AdmitStreams(max_queued=3)
    stream = streams.open()
    stream.beat(0.1)
    events = stream.events()
    assert [await _kinds(events) for _ in range(3)] == [["beat"]] * 3
    streams.connected(stream, "g")
    streams.send("g", AdmitEvent(refusal=Refusal()))
    assert await _kinds(events) == ["refusal"]
    streams.close()
    assert [event async for event in events] == []


async def _kinds(events: AsyncIterator[AdmitEvents]) -> list[str | None]:
    return [event.WhichOneof("event") for event in (await anext(events)).events]


async def test_waiting_events_form_bounded_batches() -> None:
    streams = AdmitStreams(max_queued=1000)
    stream = streams.open()
    streams.connected(stream, "g")
    for position in range(MAX_BATCH + 1):
        streams.send("g", AdmitEvent(refusal=Refusal(retry_after_s=position)))
    streams.close()
    batches = [[event.refusal.retry_after_s for event in events.events] async for events in stream.events()]
    assert batches == [[*range(MAX_BATCH)], [MAX_BATCH]]


async def test_close_events_share_one_message() -> None:
    streams = AdmitStreams(max_queued=1000, message_every_s=0.3)
    stream = streams.open()
    streams.connected(stream, "g")
    events = stream.events()
    for _ in range(AT_ONCE):
        streams.send("g", AdmitEvent(refusal=Refusal()))
        assert len(await _kinds(events)) == 1
    streams.send("g", AdmitEvent(refusal=Refusal()))
    following = asyncio.create_task(_kinds(events))
    await asyncio.sleep(0)  # the stream has seen the first of two
    streams.send("g", AdmitEvent(refusal=Refusal()))
    assert len(await following) == 2
