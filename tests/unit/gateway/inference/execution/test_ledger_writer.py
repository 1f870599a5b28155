"""Reservations that could not be ended are tried again, off their requests' path and within bounds."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.gateway_ports import InMemoryPorts
from tests.support.wait import eventually
from torchrelay.gateway.core import OpenedRequest, Reservation
from torchrelay.gateway.inference.execution import ledger_writer
from torchrelay.gateway.inference.execution.ledger_writer import LedgerWriter

OPENED = OpenedRequest("r", "t", "k", "m", "v", "p", 1, 1, 1, "g", 0)
RESERVATION = Reservation("rsv", "t", 5)


class Limits(InMemoryPorts):
    """Whose Redis does not answer the first ``num_lost`` releases."""

    num_lost = 0
    num_asked = 0

    async def release(self, reservation: Reservation, cost_nano: int) -> bool:
        self.num_asked += 1
        return self.num_asked > self.num_lost and await super().release(reservation, cost_nano)


@pytest.fixture
def limits() -> Limits:
    return Limits([])


async def settle(writer: LedgerWriter) -> None:
    await writer.settle(writer.open(OPENED), RESERVATION, "r", [])


async def test_a_lost_release_is_repeated_and_nobody_waits_for_it(
    limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_writer, "RELEASE_RETRY_S", (0.05, 0.05, 0.05))
    limits.num_lost = 3
    async with LedgerWriter(limits, limits, drain_s=5) as writer:
        await settle(writer)
        assert (limits.num_asked, limits.released, writer.num_waiting) == (1, {}, 0)
        await eventually(lambda: "rsv" in limits.released)
        assert limits.num_asked == 4


async def test_repeats_are_bounded(limits: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_writer, "RELEASE_RETRY_S", (0.05, 0.05))
    monkeypatch.setattr(ledger_writer, "MAX_RELEASES", 2)
    limits.num_lost = 1000
    async with LedgerWriter(limits, limits, drain_s=5) as writer:
        for _ in range(4):
            await settle(writer)
        await asyncio.sleep(0.5)
        assert limits.num_asked == 4 + 2 * 2


@pytest.mark.parametrize("num_lost", [1, 1000])
async def test_closing_tries_once_more_at_once(limits: Limits, num_lost: int) -> None:
    limits.num_lost = num_lost
    began_s = time.monotonic()
    async with LedgerWriter(limits, limits, drain_s=5) as writer:
        await settle(writer)
    assert limits.num_asked == 2
    assert bool(limits.released) == (num_lost == 1)
    assert time.monotonic() - began_s < 1
