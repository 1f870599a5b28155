"""The order of turns, and the share of the event loop that they take."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from functools import partial
from itertools import pairwise

import pytest

from tests.support.wait import HANG_S
from torchrelay.gateway.edge.turns import ROUND_S, ClientGroup, Turns

ACME, UMBRELLA = ClientGroup("ten-acme", is_authenticated=True), ClientGroup("ten-umbrella", is_authenticated=True)
TIMER_S = 0.001  # uvloop keeps milliseconds
KEYLESS = ClientGroup("10.0.0.1", is_authenticated=False)


async def taken(turns: Turns, groups: list[ClientGroup]) -> list[int]:
    """The order in which calls, by their place in ``groups``, are called while all wait for the first."""
    order: list[int] = []
    all_called = asyncio.Event()

    def call(place: int) -> None:
        order.append(place)
        if len(order) == len(groups):
            all_called.set()

    for place, group in enumerate(groups):
        turns.take(group, partial(call, place))
    assert order == [0], "the first one waits for nobody"
    await all_called.wait()
    return order


CROWD = [ClientGroup(f"10.0.0.{number}", is_authenticated=False) for number in range(20)]


@pytest.mark.parametrize(
    ("groups", "order"),
    [
        ([ACME] * 4 + [UMBRELLA] * 2, [0, 1, 4, 2, 5, 3]),
        ([KEYLESS] * 3 + [ACME], [0, 3, 1, 2]),
        ([*CROWD, ACME, ACME, UMBRELLA], [0, 20, 1, 22, 2, 21, 3]),
    ],
    ids=["tenants alternate", "keyless calls are in order", "keyless groups have every second turn at most"],
)
async def test_order_of_turns(groups: list[ClientGroup], order: list[int]) -> None:
    assert (await taken(Turns(max_at_once=1), groups))[: len(order)] == order


async def test_pause_is_twice_as_long_as_the_calls() -> None:
    turns, begun_at = Turns(), list[float]()
    all_called = asyncio.Event()

    def call() -> None:
        begun_at.append(time.perf_counter())
        done_at = time.thread_time() + 2 * ROUND_S  # so one at once
        while time.thread_time() < done_at:
            pass
        if len(begun_at) == 4:
            all_called.set()

    for _ in range(4):
        turns.take(ACME, partial(call))
    await all_called.wait()
    for before, after in pairwise(begun_at):
        assert after - before >= 6 * ROUND_S - TIMER_S


async def test_withdrawn_call_is_not_called() -> None:
    turns, called = Turns(max_at_once=1), list[int]()
    done = asyncio.Event()
    calls = [partial(called.append, index) for index in range(5)]
    for call in calls:
        turns.take(KEYLESS, call)
    for call in calls:
        turns.withdraw(KEYLESS, call)  # the first one has been called
    turns.take(KEYLESS, done.set)
    await done.wait()
    turns.withdraw(KEYLESS, calls[0])
    assert called == [0]


async def test_call_that_raises_leaves_other_turns() -> None:
    turns, done = Turns(max_at_once=1), asyncio.Event()

    def call() -> None:
        raise RuntimeError("a fault")

    with pytest.raises(RuntimeError):
        turns.take(ACME, call)
    turns.take(UMBRELLA, done.set)
    async with asyncio.timeout(HANG_S):
        await done.wait()


async def test_number_of_calls_at_once_follows_their_cost() -> None:
    assert await most_at_once(ROUND_S / 100, 200) > 4
    assert await most_at_once(ROUND_S, 20) == 1


async def most_at_once(work_s: float, num_calls: int) -> int:
    """Calls in one round of the loop, of the second half of ``num_calls``. Nothing but their work takes time: beside
    other processes a call that is interrupted seems dear.
    """
    clock_s, round_of, num_rounds = 0.0, list[int](), 0
    turns = Turns(clock=lambda: clock_s)

    def call() -> None:
        nonlocal clock_s
        clock_s += work_s
        round_of.append(num_rounds)

    for _ in range(num_calls):
        turns.take(ACME, partial(call))
    while len(round_of) < num_calls:
        await asyncio.sleep(0)
        num_rounds += 1
    return max(Counter(round_of[num_calls // 2 :]).values())
