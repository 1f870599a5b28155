"""Failed releases of reservations are retried, off the request path and within bounds; consumers are notified."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.gateway_ports import InMemoryPorts
from tests.support.wait import eventually
from torchrelay.gateway.core import OpenedRequest, Reservation
from torchrelay.gateway.inference.execution.ledger_writer import LedgerWriter
from torchrelay.gateway.inference.execution.notifier import Notifier

OPENED = OpenedRequest("r", "t", "k", "m", "v", "p", 1, 1, 1, "g", 0)
RESERVATION = Reservation("rsv", "t", 5, 100)


class Limits(InMemoryPorts):
    """Limits whose Redis does not answer the first ``num_lost`` releases."""

    num_lost = 0
    num_asked = 0

    async def release(self, reservation: Reservation, cost_nano: int) -> bool:
        self.num_asked += 1
        return self.num_asked > self.num_lost and await super().release(reservation, cost_nano)


@pytest.fixture
def limits() -> Limits:
    return Limits([])


async def settle(writer: LedgerWriter) -> None:
    await writer.settle(writer.open(OPENED), RESERVATION, "r", "acme/echo", [])


async def test_lost_release_is_retried_off_the_request_path(limits: Limits) -> None:
    limits.num_lost = 3
    async with LedgerWriter(limits, limits, drain_s=5, release_retry_s=(0.05,) * 3) as writer:
        await settle(writer)
        assert (limits.num_asked, limits.released, writer.num_waiting) == (1, {}, 0)
        await eventually(lambda: "rsv" in limits.released)
        assert limits.num_asked == 4


async def test_retried_releases_are_bounded(limits: Limits) -> None:
    limits.num_lost = 1000
    async with LedgerWriter(limits, limits, drain_s=5, release_retry_s=(0.05,) * 2, max_releases=2) as writer:
        for _ in range(4):
            await settle(writer)
        await eventually(lambda: limits.num_asked >= 4 + 2 * 2)
    assert limits.num_asked == 4 + 2 * 2  # on exit each release that still waited would be tried once more


@pytest.mark.parametrize("num_lost", [1, 1000])
async def test_close_retries_releases_once_at_once(limits: Limits, num_lost: int) -> None:
    limits.num_lost = num_lost
    async with LedgerWriter(limits, limits, drain_s=30, release_retry_s=(3600.0,) * 2) as writer:
        await settle(writer)
    assert limits.num_asked == 2  # a retry after its delay would be cancelled by then
    assert bool(limits.released) == (num_lost == 1)


async def test_notifications_are_coalesced_and_none_is_lost() -> None:
    notifier = Notifier(10, lambda: 10)
    notifier.notify()
    notifier.notify()
    assert await notifier.wait()
    waiting = asyncio.ensure_future(notifier.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    notifier.notify()
    assert await waiting
    notifier.close()


async def test_notifier_ticks_without_notifications_until_closed() -> None:
    notifier = Notifier(0.01, lambda: 0.02)
    assert not await notifier.wait()
    assert not await notifier.wait()
    notifier.close()
    assert notifier._timer.cancelled()


async def test_cancelled_wait_loses_no_notification() -> None:
    notifier = Notifier(10, lambda: 10)
    waiting = asyncio.ensure_future(notifier.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    notifier.notify()
    assert await notifier.wait()
    notifier.close()


async def test_pause_ignores_notifications_and_can_be_ended() -> None:
    notifier = Notifier(10, lambda: 10)
    await notifier.pause(0.01)
    notifier.end_pause()  # nobody pauses
    pausing = asyncio.ensure_future(notifier.pause(10))
    await asyncio.sleep(0)
    notifier.notify()
    await asyncio.sleep(0)
    assert not pausing.done()
    notifier.end_pause()
    await pausing
    assert await notifier.wait()
    notifier.close()
