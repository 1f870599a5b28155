"""Who has the next turn, and how much of the event loop the turns take."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from torchrelay.gateway.http.turns import MAX_PAUSE_S, Lane, Turns

ACME, UMBRELLA = Lane("ten-acme", is_of_strangers=False), Lane("ten-umbrella", is_of_strangers=False)
STRANGERS = Lane("10.0.0.1", is_of_strangers=True)


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
    assert await taken(Turns(at_once=1), wanted) == ["a1", "a2", "u1", "a3", "u2", "a4"]


async def test_of_strangers_the_last_one_goes_first() -> None:
    wanted = [(STRANGERS, "s1"), (STRANGERS, "s2"), (STRANGERS, "s3"), (ACME, "a1")]
    assert await taken(Turns(at_once=1), wanted) == ["s1", "s3", "a1", "s2"]


async def test_a_few_are_called_at_once_and_the_rest_after_a_pause_as_long() -> None:
    turns, called_at = Turns(at_once=2), list[float]()
    all_called = asyncio.Event()

    def call() -> None:
        time.sleep(0.01)  # the work
        called_at.append(time.perf_counter())
        if len(called_at) == 5:
            all_called.set()

    turns.take(ACME, call=lambda: called_at.append(time.perf_counter()))
    for _ in range(4):
        turns.take(ACME, partial(call))
    await all_called.wait()
    first, second, third = called_at[1:4]
    assert third - second >= min(MAX_PAUSE_S, second - first), "no pause after the second"


async def test_a_call_that_is_given_up_is_not_called_and_keeps_nobody_waiting() -> None:
    turns, called = Turns(at_once=1), list[int]()
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
