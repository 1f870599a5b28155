"""Tasks that run alongside a block or end together."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from torchrelay.gateway.background import all_ended
from torchrelay.gateway.thread_pool import batch_executor


async def test_all_ended_waits_for_the_rest_after_a_failure() -> None:
    ended: list[str] = []

    async def fail(name: str) -> None:
        raise ValueError(name)

    async def end_later() -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        ended.append("later")

    with pytest.raises(ExceptionGroup) as caught:
        await all_ended(fail("first"), end_later(), fail("last"))
    assert ended == ["later"]
    assert [str(error) for error in caught.value.exceptions] == ["first", "last"]


async def test_all_ended_raises_nothing_on_success() -> None:
    ended: list[str] = []

    async def end(name: str) -> None:
        await asyncio.sleep(0)
        ended.append(name)

    await all_ended(end("first"), end("last"))
    assert ended == ["first", "last"]


def scheduling_policy() -> int:
    """The scheduling scheduling_policy of the calling thread; 0 is the default."""
    return os.sched_getscheduler(0) if sys.platform == "linux" else 0


def test_batch_threads_yield_the_core() -> None:
    with batch_executor(1, "side") as threads:
        assert threads.submit(scheduling_policy).result() == (os.SCHED_BATCH if sys.platform == "linux" else 0)
    assert scheduling_policy() == 0
