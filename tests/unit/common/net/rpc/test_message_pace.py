"""How soon messages follow each other."""

from __future__ import annotations

import asyncio

import pytest

from torchrelay.common.net.rpc.message_pace import MessagePace


async def is_at_once(pace: MessagePace) -> bool:
    try:
        async with asyncio.timeout(0):
            await pace.wait()
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("at_once", [1, 4])
async def test_the_first_few_go_at_once(at_once: int) -> None:
    pace = MessagePace(every_s=60.0, at_once=at_once)
    assert [await is_at_once(pace) for _ in range(at_once + 2)] == [True] * at_once + [False] * 2


async def test_over_time_each_waits_for_its_turn() -> None:
    pace, clock = MessagePace(every_s=0.01), asyncio.get_running_loop().time
    begin = clock()
    for _ in range(10):
        await pace.wait()
    assert clock() - begin > 0.05  # four at once, six after them


async def test_after_a_long_silence_no_more_than_a_few_go_at_once() -> None:
    pace = MessagePace(every_s=0.02, at_once=2)
    for _ in range(3):
        await pace.wait()
    await asyncio.sleep(0.1)  # five turns pass unused
    assert [await is_at_once(pace) for _ in range(3)] == [True, True, False]
