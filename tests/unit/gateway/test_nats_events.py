from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.brokers import broker_program, free_port, listening, nats_server
from tests.support.silent_proxy import SilentProxy
from tests.support.wait import HANG_S, eventually
from torchrelay.common.net.nats_client import Subjects, connect
from torchrelay.gateway.background import background
from torchrelay.gateway.nats_events import NatsEvents


async def test_hint_reaches_other_gateways_and_model_change_the_history(nats_url: str) -> None:
    prefix = f"t{secrets.token_hex(4)}"
    received = asyncio.Event()
    here = NatsEvents(nats_url, prefix, "gw-1", lambda: None)
    there = NatsEvents(nats_url, prefix, "gw-2", received.set)
    async with background(here.run(), there.run()), asyncio.timeout(HANG_S):
        await eventually(lambda: here.registers() and there.registers())
        assert not received.is_set()
        await here.key_revoked()
        await received.wait()
        await here.model_changed("deleted", "acme/glossary", None)
        client = await connect(nats_url, "test")
        history = await client.jetstream().subscribe(Subjects(prefix).event("model.deleted"))
        kept = await history.next_msg(timeout=HANG_S)
        await client.close()
    assert json.loads(kept.data or b"")["model"] == "acme/glossary"


async def test_late_nats_is_connected_and_delays_nothing(tmp_path: Path) -> None:
    port = free_port()
    signals = NatsEvents(f"nats://127.0.0.1:{port}", f"t{secrets.token_hex(4)}", "gw-1", lambda: None)
    async with background(signals.run(retry_s=0.05)):
        await signals.key_revoked()  # dropped without an error
        assert signals.registers() is None
        with nats_server(tmp_path, port):
            await eventually(signals.registers)


async def test_hung_broker_delays_no_request(nats_url: str) -> None:
    async with SilentProxy(nats_url).serving() as proxy:
        signals = NatsEvents(proxy.url, f"t{secrets.token_hex(4)}", "gw-1", lambda: None)
        async with background(signals.run()):
            await eventually(signals.registers)
            proxy.fall_silent()
            async with asyncio.timeout(HANG_S):
                for _ in range(5000):  # a durable event waits a second for its acknowledgement
                    await signals.key_revoked()
                    await signals.model_changed("deleted", "acme/glossary", None)
            proxy.speak()


@pytest.fixture
def plain_nats_url(tmp_path: Path) -> Iterator[str]:
    """A server without JetStream, which cannot create streams."""
    command = [broker_program("nats-server"), "-a", "127.0.0.1"]
    with listening(lambda port: [*command, "-p", str(port)], tmp_path / "nats.log", "127.0.0.1") as port:
        yield f"nats://127.0.0.1:{port}"


async def test_hint_works_without_jetstream(plain_nats_url: str) -> None:
    received = asyncio.Event()
    here = NatsEvents(plain_nats_url, "", "gw-1", lambda: None)
    there = NatsEvents(plain_nats_url, "", "gw-2", received.set)
    async with background(here.run(retry_s=0.1), there.run(retry_s=0.1)):

        async def are_connected() -> bool:
            return not (await here.ask() or await there.ask())

        await eventually(are_connected)
        await here.key_revoked()
        await asyncio.wait_for(received.wait(), HANG_S)
        assert here.registers() is None


async def test_dropped_event_is_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with nats_server(tmp_path) as url:
        signals = NatsEvents(url, f"t{secrets.token_hex(4)}", "gw-1", lambda: None)
        running = asyncio.create_task(signals.run())
        await eventually(signals.registers)
    await eventually(signals.ask, "the client notices the loss")
    await signals.model_changed("deleted", "acme/glossary", None)
    await eventually(lambda: "event_not_published" in capsys.readouterr().out)
    running.cancel()
    await asyncio.wait({running})
