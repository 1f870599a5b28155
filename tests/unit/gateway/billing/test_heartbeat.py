from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

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


def test_a_count_that_stands_still_is_gone_after_a_while_by_the_observers_clock() -> None:
    seen = observe_beats({}, {"a": 5, "b": 5}, now=0.0)
    seen = observe_beats(seen, {"a": 6, "b": 5}, now=8.0)
    assert stale_gateways(seen, 9.9, after_s=10) == set()
    assert stale_gateways(seen, 10.0, after_s=10) == {"b"}


def test_a_gateway_without_a_row_is_gone_unless_it_makes_the_row_again() -> None:
    seen = observe_beats({}, {"a": NO_ROW, "b": NO_ROW}, now=0.0)
    seen = observe_beats(seen, {"a": 1, "b": NO_ROW}, now=4.0)
    assert stale_gateways(seen, 10.0, after_s=10) == {"b"}


@given(st.lists(st.integers(0, 3), min_size=1), st.floats(0.5, 5))
def test_who_counts_up_is_never_gone(steps: list[int], after_s: float) -> None:
    seen: dict[str, BeatObservation] = {}
    for beat, _ in enumerate(steps):
        now = beat * after_s * 0.9
        seen = observe_beats(seen, {"a": beat}, now)
        assert stale_gateways(seen, now, after_s) == set()


async def test_beats_count_up_and_leaving_takes_the_row_away(parts: AccountingRig) -> None:
    here, there = Heartbeat(parts.database, "here"), Heartbeat(parts.database, "there")
    await here.beat()
    await here.beat()
    await there.beat()
    assert await here.beats() == {"here": 2, "there": 1}
    await here.leave()
    assert await there.beats() == {"there": 1}


async def until_beaten(heartbeat: Heartbeat, gateway_id: str, times: int) -> None:
    async with asyncio.timeout(30):
        while (await heartbeat.beats()).get(gateway_id, 0) < times:  # noqa: ASYNC110 -- a count in SQL has no event
            await asyncio.sleep(0.01)


async def test_a_gateway_that_others_took_for_gone_registers_again_and_knows_it(parts: AccountingRig) -> None:
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


async def test_beats_go_on_when_sql_was_away(parts: AccountingRig) -> None:
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


async def test_a_beat_that_hangs_is_given_up_and_tried_again(parts: AccountingRig) -> None:
    class Stuck(Heartbeat):
        num_stuck = 0

        async def beat(self) -> None:
            if not self.num_stuck:
                self.num_stuck += 1
                await asyncio.Event().wait()
            await super().beat()

    heartbeat = Stuck(parts.database, "here")
    async with background(heartbeat.run(0.01, timeout_s=0.05)):
        await until_beaten(heartbeat, "here", 2)
    assert (heartbeat.num_stuck, heartbeat.num_lost) == (1, 0)
