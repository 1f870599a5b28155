"""Contenders for the lease, at a real NATS server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
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


@asynccontextmanager
async def kept(lease: Lease) -> AsyncIterator[None]:
    """The lease is renewed in the block, and its holder has not lost it by the end."""
    async with asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(lease.keep())
        yield
        assert not keeping.done()
        keeping.cancel()


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
    async with kept(first):
        assert not await holds(second, 2 * KEPT_S)
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
    async with kept(second):
        with pytest.raises(Conflict, match="another scheduler has the lease"):
            await first.keep()
        await asyncio.sleep(KEPT_S)


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


async def becomes_held(client: Client, expected: bool) -> None:
    async def is_as_expected() -> bool:
        try:
            message = await client.jetstream().get_last_msg(SUBJECTS.lease_stream, SUBJECTS.lease)
        except NotFoundError:
            return not expected
        return bool(message.data) is expected

    await eventually(is_as_expected)


async def test_paused_holder_without_rival_has_it_again(client: Client) -> None:
    lease = contender(client, "a:1")
    await lease.acquire()
    await becomes_held(client, False)  # a pause in which it expires
    async with kept(lease):
        await becomes_held(client, True)
        assert not await holds(contender(client, "b:1"), 3 * LEASE_S)


async def test_holder_outlives_its_broker(tmp_path: Path) -> None:
    """It goes on while NATS is away, and has the lease again at the new server, which knew none. There a contender,
    even if it has waited since before, is not faster.
    """
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    async with AsyncExitStack() as holder:
        with nats_server(folders[0]) as url:
            active, standby = await connect(url, "active"), await connect(url, "standby")
            first, second = contender(active, "a:1", lease_s=2.0), contender(standby, "b:1", lease_s=2.0)
            await first.acquire()
            await holder.enter_async_context(kept(first))
            waiting = asyncio.create_task(second.acquire())
        await eventually(lambda: not active.is_connected and not standby.is_connected)
        with nats_server(folders[1], int(url.rpartition(":")[2])):
            await becomes_held(standby, True)
            assert not await holds(contender(standby, "c:1", lease_s=2.0), 3.0)
            assert not waiting.done()
            await holder.aclose()
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
