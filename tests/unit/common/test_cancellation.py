"""Cancellation ends awaits that swallow it."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress

import pytest

from torchrelay.common.cancellation import cancellable, raise_if_cancelled
from torchrelay.common.net.nats_client import connect


async def test_work_that_swallows_cancel_is_cancelled_again() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def swallows_cancel() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

    caller = asyncio.create_task(cancellable(swallows_cancel()))
    await begun.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()


async def test_work_ends_before_repeatedly_cancelled_caller() -> None:
    begun, may_end, is_over = asyncio.Event(), asyncio.Event(), False
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, about: complaints.append(about["message"]))

    async def swallows_cancel() -> None:
        nonlocal is_over
        while not may_end.is_set():
            with suppress(asyncio.CancelledError):
                begun.set()
                await may_end.wait()
        is_over = True
        raise ValueError("nobody awaits this error")

    caller = asyncio.create_task(cancellable(swallows_cancel()))
    await begun.wait()
    for _ in range(3):
        caller.cancel()
        await asyncio.sleep(0.01)
    assert not caller.done()
    may_end.set()
    await asyncio.wait({caller})
    assert caller.cancelled() and is_over
    gc.collect()
    assert not complaints


async def test_results_and_errors_pass() -> None:
    async def adds(left: int, right: int) -> int:
        if right < 0:
            raise ValueError("negative")
        return left + right

    assert await cancellable(adds(1, 2)) == 3
    with pytest.raises(ValueError, match="negative"):
        await cancellable(adds(1, -2))


async def test_swallowed_cancel_is_raised_again() -> None:
    begun = asyncio.Event()

    async def loop() -> None:
        while True:
            raise_if_cancelled()
            with suppress(asyncio.CancelledError):
                begun.set()
                await asyncio.Event().wait()

    looping = asyncio.create_task(loop())
    await begun.wait()
    looping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looping


async def test_connecting_ends_whenever_it_is_cancelled(nats_url: str) -> None:
    """Cancels at each turn of the loop until it is connected; `nats.connect` alone swallows five to ten of these."""
    num_cancelled = 0
    while True:
        connecting = asyncio.create_task(connect(nats_url, "test"))
        for _ in range(num_cancelled):
            await asyncio.sleep(0)
        if connecting.done():
            await connecting.result().close()
            break
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        num_cancelled += 1
    assert num_cancelled > 5
