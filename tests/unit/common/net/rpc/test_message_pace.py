"""The pace of a stream's messages."""

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


def times_of_messages(pace: MessagePace, count: int, now_s: float) -> list[float]:
    """The times at which messages go that are all ready at ``now_s``."""
    times = []
    for _ in range(count):
        now_s += max(0.0, pace.left_s(now_s))
        pace.note_sent(now_s)
        times.append(now_s)
    return times


@pytest.mark.parametrize("at_once", [1, 4])
async def test_first_messages_go_at_once(at_once: int) -> None:
    pace = MessagePace(every_s=60.0, at_once=at_once)
    assert [await is_at_once(pace) for _ in range(at_once + 2)] == [True] * at_once + [False] * 2


def test_further_messages_are_evenly_paced() -> None:
    times = times_of_messages(MessagePace(every_s=0.5), 10, now_s=100.0)
    assert times == [100.0] * 4 + [100.5, 101.0, 101.5, 102.0, 102.5, 103.0]


def test_silence_allows_only_first_messages_at_once() -> None:
    pace = MessagePace(every_s=0.5, at_once=2)
    assert times_of_messages(pace, 3, now_s=100.0) == [100.0, 100.0, 100.5]
    assert times_of_messages(pace, 3, now_s=103.0) == [103.0, 103.0, 103.5]  # five turns passed unused
