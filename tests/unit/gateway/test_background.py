"""Tasks that run alongside a block, the lifetime of the token path, and events over NATS."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.brokers import free_port, listening, nats_server
from tests.support.echo_services import EchoScheduler
from tests.support.gateway_ports import InMemoryPorts
from tests.support.silent_proxy import SilentProxy
from tests.support.wait import HANG_S, eventually
from torchrelay.cli.up.broker_programs import nats_program
from torchrelay.common.net.nats_client import Subjects, connect
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.control.v1 import scheduler_pb2, types_pb2
from torchrelay.gateway.background import all_ended, background
from torchrelay.gateway.inference.core import RequestEvent
from torchrelay.gateway.limits.connection_shares import connection_shares
from torchrelay.gateway.nats_events import NatsEvents
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
    await all_ended(end_later(), end_later())
    assert ended == ["later"] * 3


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
    command = [nats_program(), "-a", "127.0.0.1"]
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
