"""Who has the next turn, and how much of the event loop the turns take."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from functools import partial
from itertools import pairwise

import pytest

from torchrelay.gateway.edge.turns import ROUND_S, ClientGroup, Turns

ACME, UMBRELLA = ClientGroup("ten-acme", is_of_strangers=False), Lane("ten-umbrella", is_authenticated=True)
TIMER_S = 0.001  # uvloop keeps milliseconds
STRANGERS = ClientGroup("10.0.0.1", is_authenticated=False)


async def taken(turns: Turns, wanted: list[tuple[Lane, str]]) -> list[str]:
    """The order in which turns, asked for in the order of ``wanted``, are taken while all wait for the first."""
    order: list[str] = []
    all_called = asyncio.Event()

    def call(name: str) -> None:
        order.append(name)
        if len(order) == len(wanted):
            all_called.set()

    for lane, name in wanted:
        turns.take(lane, partial(call, name))
    assert order == [wanted[0][1]], "the first one waits for nobody"
    await all_called.wait()
    return order


async def test_a_tenants_turns_are_in_order_and_tenants_alternate() -> None:
    wanted = [(ACME, "a1"), (ACME, "a2"), (ACME, "a3"), (ACME, "a4"), (UMBRELLA, "u1"), (UMBRELLA, "u2")]
    assert await taken(Turns(max_at_once=1), wanted) == ["a1", "a2", "u1", "a3", "u2", "a4"]


async def test_of_strangers_the_last_one_goes_first() -> None:
    wanted = [(STRANGERS, "s1"), (STRANGERS, "s2"), (STRANGERS, "s3"), (ACME, "a1")]
    assert await taken(Turns(max_at_once=1), wanted) == ["s1", "a1", "s3", "s2"]


async def test_strangers_of_many_addresses_have_every_second_turn_at_most() -> None:
    crowd = [(ClientGroup(f"10.0.0.{number}", is_authenticated=False), f"s{number}") for number in range(20)]
    wanted = [*crowd, (ACME, "a1"), (ACME, "a2"), (UMBRELLA, "u1")]
    order = await taken(Turns(max_at_once=1), wanted)
    assert order[:7] == ["s0", "a1", "s1", "u1", "s2", "a2", "s3"]


async def test_a_pause_is_twice_as_long_as_the_calls_before_it() -> None:
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


async def test_a_call_that_is_given_up_is_not_called_and_keeps_nobody_waiting() -> None:
    turns, called = Turns(max_at_once=1), list[int]()
    done = asyncio.Event()
    calls = [partial(called.append, index) for index in range(5)]
    for call in calls:
        turns.take(STRANGERS, call)
    for call in calls:
        turns.give_up(STRANGERS, call)  # the first one has been called
    turns.take(STRANGERS, done.set)
    await done.wait()
    turns.give_up(STRANGERS, calls[0])
    assert called == [0]


async def test_a_call_that_raises_ends_no_turns_of_others() -> None:
    turns, done = Turns(max_at_once=1), asyncio.Event()

    def call() -> None:
        raise RuntimeError("a fault")

    with pytest.raises(RuntimeError):
        turns.take(ACME, call)
    turns.take(UMBRELLA, done.set)
    async with asyncio.timeout(10):
        await done.wait()


async def test_many_cheap_calls_are_called_at_once_and_few_dear_ones() -> None:
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
