"""Contenders for the lease, at a real NATS server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from nats.js.errors import NotFoundError

from tests.support.brokers import nats_cluster, nats_server
from tests.support.wait import HANG_S, eventually
from torchrelay.common.errors import Conflict
from torchrelay.common.net.nats_client import Subjects, connect
from torchrelay.scheduler.service.lease import Lease

SUBJECTS = Subjects("lease-test")
LEASE_S = 0.6
KEPT_S = 3.0  # of leases that a holder renews: no machine starves it for as long


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    with nats_server(tmp_path) as url:
        client = await connect(url, "test")
        yield client
        await client.close()


def contender(client: Client, holder: str, lease_s: float = LEASE_S) -> Lease:
    return Lease(client, SUBJECTS, holder, lease_s)


async def holds(lease: Lease, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await lease.acquire()
    except TimeoutError:
        return False
    return True


async def test_renewed_lease_is_not_given_to_another(client: Client) -> None:
    first, second = contender(client, "a:1", KEPT_S), contender(client, "b:1", KEPT_S)
    await first.acquire()
    keeping = asyncio.create_task(first.keep())
    assert not await holds(second, 2 * KEPT_S)
    keeping.cancel()
    assert await holds(second, HANG_S), "it expires without renewal"


async def test_of_many_contenders_one_wins(client: Client) -> None:
    contenders = [contender(client, f"{number}:1", lease_s=60.0) for number in range(8)]
    waiting = [asyncio.create_task(each.acquire()) for each in contenders]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(3 * LEASE_S)  # time for a second winner to appear
    assert sum(task.done() for task in waiting) == 1
    for task in waiting:
        task.cancel()


async def test_released_lease_is_free_at_once(client: Client) -> None:
    first, second = contender(client, "a:1", lease_s=60.0), contender(client, "b:1", lease_s=60.0)
    await first.acquire()
    await first.release()
    assert await holds(second, HANG_S / 4), "long before it would expire"


async def test_successor_at_same_address_does_not_wait(client: Client) -> None:
    await contender(client, "a:1", lease_s=60.0).acquire()
    assert await holds(contender(client, "a:1", lease_s=60.0), HANG_S / 4)


async def test_paused_holder_learns_that_another_has_it(client: Client) -> None:
    first, second = contender(client, "a:1", KEPT_S), contender(client, "b:1", KEPT_S)
    await first.acquire()
    assert await holds(second, HANG_S), "the first was paused for as long"
    keeping = asyncio.create_task(second.keep())
    with pytest.raises(Conflict, match="another scheduler has the lease"):
        await first.keep()
    await asyncio.sleep(KEPT_S)
    assert not keeping.done()
    keeping.cancel()


async def test_cancelled_holder_renews_no_more(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It went on, and its process never ended, if NATS replied in the moment of the cancellation."""
    lease, asked = contender(client, "a:1"), asyncio.Event()
    await lease.acquire()
    publish = lease._js.publish

    async def publish_and_drop_cancellation(*args: Any, **options: Any) -> Any:
        asked.set()
        with suppress(asyncio.CancelledError):  # as asyncio.wait_for does
            await asyncio.Event().wait()
        return await publish(*args, **options)

    monkeypatch.setattr(lease._js, "publish", publish_and_drop_cancellation)
    keeping = asyncio.create_task(lease.keep())
    await asked.wait()
    asked.clear()
    keeping.cancel()
    renewing = asyncio.create_task(asked.wait())
    await asyncio.wait((keeping, renewing), return_when=asyncio.FIRST_COMPLETED)
    assert keeping.cancelled() and not renewing.done()
    renewing.cancel()


async def is_held(client: Client) -> bool:
    try:
        return bool((await client.jetstream().get_last_msg(SUBJECTS.lease_stream, SUBJECTS.lease)).data)
    except NotFoundError:
        return False


async def becomes_held(client: Client, expected: bool) -> None:
    async with asyncio.timeout(HANG_S):
        while True:
            if await is_held(client) is expected:
                return
            await asyncio.sleep(0.05)


async def test_paused_holder_without_rival_has_it_again(client: Client) -> None:
    lease = contender(client, "a:1")
    await lease.acquire()
    await becomes_held(client, False)  # a pause in which it expires
    keeping = asyncio.create_task(lease.keep())
    await becomes_held(client, True)
    assert not await holds(contender(client, "b:1"), 3 * LEASE_S)
    assert not keeping.done()
    keeping.cancel()


async def test_holder_outlives_its_broker(tmp_path: Path) -> None:
    """It goes on while NATS is away, and has the lease again at the new server, which knew none."""
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with nats_server(tmp_path / "first") as url:
        client = await connect(url, "test")
        lease = contender(client, "a:1")
        await lease.acquire()
        keeping = asyncio.create_task(lease.keep())
    await eventually(lambda: not client.is_connected)
    with nats_server(tmp_path / "second", int(url.rpartition(":")[2])):
        await eventually(lambda: client.is_connected)
        await becomes_held(client, True)
        assert not await holds(contender(client, "b:1"), 3 * LEASE_S)
        assert not keeping.done()
        keeping.cancel()
        await client.close()


async def test_contender_lets_holder_renew_after_broker_was_away(tmp_path: Path) -> None:
    """At a new server, which knows neither, the standby is not faster."""
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with nats_server(tmp_path / "first") as url:
        active, standby = await connect(url, "active"), await connect(url, "standby")
        first, second = contender(active, "a:1", lease_s=2.0), contender(standby, "b:1", lease_s=2.0)
        await first.acquire()
        keeping, waiting = asyncio.create_task(first.keep()), asyncio.create_task(second.acquire())
    await eventually(lambda: not active.is_connected and not standby.is_connected)
    with nats_server(tmp_path / "second", int(url.rpartition(":")[2])):
        await becomes_held(standby, True)
        assert not await holds(contender(standby, "c:1", lease_s=2.0), 3.0)
        assert not keeping.done() and not waiting.done()
        keeping.cancel()
        await asyncio.wait_for(waiting, HANG_S)
        await active.close()
        await standby.close()


async def test_lease_takes_new_time_from_contender(client: Client) -> None:
    await contender(client, "a:1", lease_s=60.0).acquire()
    assert await holds(contender(client, "a:1", lease_s=5.0), HANG_S / 4)
    info = await client.jetstream().stream_info(SUBJECTS.lease_stream)
    assert (info.config.max_age, info.config.duplicate_window) == (5.0, 5.0)


async def test_of_contenders_for_released_lease_in_cluster_one_wins(tmp_path: Path) -> None:
    with nats_cluster(tmp_path) as cluster:
        clients = [await connect(",".join(cluster.urls.values()), f"client-{number}") for number in range(8)]
        for round_number in range(5):
            subjects = Subjects(f"round-{round_number}")
            contenders = [Lease(client, subjects, f"{number}:1", 4.0, 3) for number, client in enumerate(clients)]
            first = Lease(clients[0], subjects, "first:1", 4.0, 3)
            await first.acquire()
            waiting = [asyncio.create_task(each.acquire()) for each in contenders]
            await asyncio.sleep(LEASE_S)  # they wait in step
            await first.release()
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(LEASE_S)  # time for a second winner to appear
            assert sum(task.done() for task in waiting) == 1
            for task in waiting:
                task.cancel()
        for client in clients:
            await client.close()
