"""Heartbeats count up; a gateway whose count stands still is stale."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from tests.support.wait import eventually
from tests.unit.gateway.conftest import AccountingRig
from torchrelay.common.errors import Unavailable
from torchrelay.gateway.background import background
from torchrelay.gateway.billing.heartbeat import (
    NO_ROW,
    BeatObservation,
    Heartbeat,
    delete_gateway,
    observe_beats,
    stale_gateways,
)


def test_unchanged_count_is_stale_after_the_limit() -> None:
    seen = observe_beats({}, {"a": 5, "b": 5}, now=0.0)
    seen = observe_beats(seen, {"a": 6, "b": 5}, now=8.0)
    assert stale_gateways(seen, 9.9, after_s=10) == set()
    assert stale_gateways(seen, 10.0, after_s=10) == {"b"}


def test_gateway_without_a_row_is_stale() -> None:
    seen = observe_beats({}, {"a": NO_ROW, "b": NO_ROW}, now=0.0)
    seen = observe_beats(seen, {"a": 1, "b": NO_ROW}, now=4.0)
    assert stale_gateways(seen, 10.0, after_s=10) == {"b"}


@given(st.lists(st.integers(0, 3), min_size=1), st.floats(0.5, 5))
def test_rising_count_is_never_stale(steps: list[int], after_s: float) -> None:
    seen: dict[str, BeatObservation] = {}
    for beat, _ in enumerate(steps):
        now = beat * after_s * 0.9
        seen = observe_beats(seen, {"a": beat}, now)
        assert stale_gateways(seen, now, after_s) == set()


async def test_beats_count_up_and_leave_deletes_the_row(parts: AccountingRig) -> None:
    here, there = Heartbeat(parts.database, "here"), Heartbeat(parts.database, "there")
    await here.beat()
    await here.beat()
    await there.beat()
    assert await here.beats() == {"here": 2, "there": 1}
    await here.leave()
    assert await there.beats() == {"there": 1}


async def until_beaten(heartbeat: Heartbeat, gateway_id: str, times: int) -> None:
    async def is_beaten() -> bool:
        return (await heartbeat.beats()).get(gateway_id, 0) >= times

    await eventually(is_beaten)


async def test_deleted_gateway_registers_again_and_counts_the_loss(parts: AccountingRig) -> None:
    here, there = Heartbeat(parts.database, "here"), Heartbeat(parts.database, "there")
    await here.beat()
    await here.beat()
    await delete_gateway(parts.database, "here", beat=1)  # seen before the second beat: it is alive
    assert await there.beats() == {"here": 2}
    await delete_gateway(parts.database, "here", beat=2)
    assert await there.beats() == {}
    assert here.num_lost == 0
    await here.beat()
    assert (await there.beats(), here.num_lost) == ({"here": 1}, 1)


async def test_beats_continue_after_failures(parts: AccountingRig) -> None:
    class Faulty(Heartbeat):
        num_faults = 0

        async def beat(self) -> None:
            faults = (Unavailable("SQL is away"), RuntimeError("deadlock detected"))
            if self.num_faults < len(faults):
                self.num_faults += 1
                raise faults[self.num_faults - 1]
            await super().beat()

    heartbeat = Faulty(parts.database, "here")
    async with background(heartbeat.run(0.01, timeout_s=10)):
        await until_beaten(heartbeat, "here", 2)
    assert (heartbeat.num_faults, heartbeat.num_lost) == (2, 0)


async def test_hung_beat_is_retried(parts: AccountingRig) -> None:
    class Stuck(Heartbeat):
        num_stuck = 0

        async def beat(self) -> None:
            if not self.num_stuck:
                self.num_stuck += 1
                await asyncio.Event().wait()
            await super().beat()

    heartbeat = Stuck(parts.database, "here")
    async with background(heartbeat.run(0.01, timeout_s=1.0)):
        await until_beaten(heartbeat, "here", 2)
    assert (heartbeat.num_stuck, heartbeat.num_lost) == (1, 0)
