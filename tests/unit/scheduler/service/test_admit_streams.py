"""The Admit streams of gateways: bounded, and replaced by newer ones."""

from __future__ import annotations

import pytest

from torchrelay.common.errors import Overloaded
from torchrelay.control.v1.scheduler_pb2 import AdmitEvent, Waiting
from torchrelay.scheduler.service.admit_streams import AdmitStreams


async def test_a_slow_gateway_loses_its_stream_and_nothing_else_grows() -> None:
    streams = AdmitStreams(max_queued=3)
    stream = streams.open()
    streams.connected(stream, "g")
    for _ in range(4):
        streams.send("g", AdmitEvent())
    with pytest.raises(Overloaded):
        async for _ in stream.events():
            pass


async def test_a_newer_stream_of_a_gateway_replaces_the_older() -> None:
    streams = AdmitStreams(max_queued=3)
    older, newer = streams.open(), streams.open()
    streams.connected(older, "g")
    streams.connected(newer, "g")
    assert [event async for event in older.events()] == []
    assert not streams.disconnected(older)  # the gateway is still here
    streams.send("g", AdmitEvent())
    streams.close()
    assert [event async for event in newer.events()] == [AdmitEvent()]
    assert streams.disconnected(newer)


async def test_a_gateway_hears_as_often_as_it_asked_for() -> None:
    streams = AdmitStreams(max_queued=3)
    stream = streams.open()
    stream.beat(0.1)
    events = stream.events()
    assert [(await anext(events)).WhichOneof("event") for _ in range(3)] == ["beat"] * 3
    streams.connected(stream, "g")
    streams.send("g", AdmitEvent(waiting=Waiting()))
    assert (await anext(events)).WhichOneof("event") == "waiting"
    streams.close()
    assert [event async for event in events] == []
