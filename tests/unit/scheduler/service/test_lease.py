"""Contenders for the lease, at a real NATS server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from tests.support.brokers import nats_server
from tests.support.wait import HANG_S, eventually
from torchrelay.common.errors import Conflict
from torchrelay.common.net.nats_client import Subjects, connect
from torchrelay.scheduler.service.lease import Lease

SUBJECTS = Subjects("lease-test")
LEASE_S = 0.6


@pytest.fixture
async def js(tmp_path: Path) -> AsyncIterator[JetStreamContext]:
    with nats_server(tmp_path) as url:
        client = await connect(url, "test")
        yield client.jetstream()
        await client.close()


def contender(js: JetStreamContext, holder: str, lease_s: float = LEASE_S) -> Lease:
    return Lease(js, SUBJECTS, holder, lease_s)


async def holds(lease: Lease, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await lease.acquire()
    except TimeoutError:
        return False
    return True


async def test_renewed_lease_is_not_given_to_another(js: JetStreamContext) -> None:
    first, second = contender(js, "a:1"), contender(js, "b:1")
    await first.acquire()
    keeping = asyncio.create_task(first.keep())
    assert not await holds(second, 3 * LEASE_S)
    keeping.cancel()
    assert await holds(second, HANG_S), "it expires without renewal"


async def test_of_many_contenders_one_wins(js: JetStreamContext) -> None:
    contenders = [contender(js, f"{number}:1", lease_s=60.0) for number in range(8)]
    waiting = [asyncio.create_task(each.acquire()) for each in contenders]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(3 * LEASE_S)  # time for a second winner to appear
    assert sum(task.done() for task in waiting) == 1
    for task in waiting:
        task.cancel()


async def test_released_lease_is_free_at_once(js: JetStreamContext) -> None:
    first, second = contender(js, "a:1", lease_s=60.0), contender(js, "b:1", lease_s=60.0)
    await first.acquire()
    await first.release()
    assert await holds(second, HANG_S / 4), "long before it would expire"


async def test_successor_at_same_address_does_not_wait(js: JetStreamContext) -> None:
    await contender(js, "a:1", lease_s=60.0).acquire()
    assert await holds(contender(js, "a:1", lease_s=60.0), HANG_S / 4)


async def test_paused_holder_learns_that_another_has_it(js: JetStreamContext) -> None:
    first, second = contender(js, "a:1"), contender(js, "b:1")
    await first.acquire()
    assert await holds(second, HANG_S), "the first was paused for as long"
    keeping = asyncio.create_task(second.keep())
    with pytest.raises(Conflict, match="another scheduler has the lease"):
        await first.keep()
    await asyncio.sleep(LEASE_S)
    assert not keeping.done()
    keeping.cancel()


async def is_held(js: JetStreamContext) -> bool:
    try:
        return bool((await js.get_last_msg(SUBJECTS.lease_stream, SUBJECTS.lease)).data)
    except NotFoundError:
        return False


async def becomes_held(js: JetStreamContext, expected: bool) -> None:
    async with asyncio.timeout(HANG_S):
        while True:
            if await is_held(js) is expected:
                return
            await asyncio.sleep(0.05)


async def test_paused_holder_without_rival_has_it_again(js: JetStreamContext) -> None:
    lease = contender(js, "a:1")
    await lease.acquire()
    await becomes_held(js, False)  # a pause in which it expires
    keeping = asyncio.create_task(lease.keep())
    await becomes_held(js, True)
    assert not await holds(contender(js, "b:1"), 3 * LEASE_S)
    assert not keeping.done()
    keeping.cancel()


async def test_holder_outlives_its_broker(tmp_path: Path) -> None:
    """It goes on while NATS is away, and has the lease again at the new server, which knew none."""
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with nats_server(tmp_path / "first") as url:
        client = await connect(url, "test")
        lease = contender(client.jetstream(), "a:1")
        await lease.acquire()
        keeping = asyncio.create_task(lease.keep())
    await eventually(lambda: not client.is_connected)
    with nats_server(tmp_path / "second", int(url.rpartition(":")[2])):
        await eventually(lambda: client.is_connected)
        await becomes_held(client.jetstream(), True)
        assert not await holds(contender(client.jetstream(), "b:1"), 3 * LEASE_S)
        assert not keeping.done()
        keeping.cancel()
        await client.close()
