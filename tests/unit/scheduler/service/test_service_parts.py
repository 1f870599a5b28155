"""The small parts of the shell: epoch, streams, history, settings, peers."""

from __future__ import annotations

import asyncio
import json

import pytest
from nats.js.errors import NoStreamResponseError
from pydantic import ValidationError

from torchrelay.common.errors import Overloaded, StaleEpoch
from torchrelay.common.ids import new_id
from torchrelay.common.net.load_reports import IDLE_EVERY_S, POLL_EVERY_S
from torchrelay.common.net.nats_client import Subjects, connect, ensure_streams
from torchrelay.control.v1.scheduler_pb2 import AdmitEvent
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.effects import SchedulerEvent
from torchrelay.scheduler.service.admit_streams import AdmitStreams
from torchrelay.scheduler.service.epoch import STARTUP_S, Epoch
from torchrelay.scheduler.service.events.publisher import EventPublisher
from torchrelay.scheduler.service.peer_channels import is_refused
from torchrelay.scheduler.settings import SchedulerSettings


def test_the_epoch_rises_at_the_start_and_yields_later() -> None:
    epoch = Epoch(1000.0)
    assert epoch.value == 1_000_000
    epoch.check(2_000_000, now=1000.5)
    assert epoch.value == 2_000_001 and not epoch.refused(1000.5)
    epoch.check(2_000_001, now=2000.0)
    with pytest.raises(StaleEpoch):
        epoch.check(2_000_002, now=1000.1 + STARTUP_S)
    assert epoch.refused(2000.0)


def test_two_reports_of_what_stays_the_same_come_while_a_new_scheduler_settles() -> None:
    late_s = IDLE_EVERY_S + POLL_EVERY_S
    assert PolicyConfig().settle_s > 1.5 * late_s
    assert 1.5 * late_s < STARTUP_S
    assert PolicyConfig().stale_s > 4 * late_s


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


async def test_history_drops_the_oldest_while_the_stream_is_away_and_keeps_order(nats_url: str) -> None:
    subjects = Subjects(new_id("t"))
    nats = await connect(nats_url, "test")
    try:
        js = nats.jetstream()
        history = EventPublisher(js, subjects, max_queued=3)
        history.note(SchedulerEvent(1.0, "place", "m", "i", "not published"))
        for number in range(5):
            history.note(
                SchedulerEvent(float(number), "wake", "m", "i", f"{number}", "instance.loading", {"n": number})
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


async def test_a_port_nobody_listens_on_is_refused() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert not await is_refused(f"127.0.0.1:{port}")
    server.close()
    await server.wait_closed()
    assert await is_refused(f"127.0.0.1:{port}")


def test_settings_become_the_config_and_a_bad_key_is_refused() -> None:
    settings = SchedulerSettings(cluster_key="ab" * 16, idle_timeout_s=5, requests_per_instance=3)
    assert settings.config.idle_timeout_s == 5 and settings.config.requests_per_instance == 3
    for key in ("abcd", "not hex at all, is it"):
        with pytest.raises(ValidationError):
            SchedulerSettings(cluster_key=key)
