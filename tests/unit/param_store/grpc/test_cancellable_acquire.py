"""A cancelled call leaves nothing acquired."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.wait import HANG_S
from torchrelay.common.errors import Conflict
from torchrelay.param_store.grpc.cancellable_acquire import acquire_on_thread, release_on_thread


async def test_resource_released_after_cancelled_acquire() -> None:
    going_on, given_back = threading.Event(), asyncio.Queue[str](1)

    def taking() -> str:
        going_on.wait(HANG_S)
        return "file"

    call = asyncio.ensure_future(acquire_on_thread(taking, given_back.put_nowait))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert given_back.empty()
    going_on.set()
    assert await asyncio.wait_for(given_back.get(), HANG_S) == "file"


async def test_failed_cancelled_acquire_releases_nothing() -> None:
    going_on, ended, given_back = threading.Event(), threading.Event(), list[str]()

    def taking() -> str:
        try:
            going_on.wait(HANG_S)
            raise Conflict("taken already")
        finally:
            ended.set()

    call = asyncio.ensure_future(acquire_on_thread(taking, given_back.append))
    await asyncio.sleep(0)
    call.cancel()
    going_on.set()
    assert await asyncio.to_thread(ended.wait, HANG_S)
    with pytest.raises(asyncio.CancelledError):
        await call
    assert given_back == []


async def test_resource_is_released_though_its_call_is_cancelled_before_a_thread_is_free() -> None:
    threads, may_go_on, released = ThreadPoolExecutor(1), threading.Event(), threading.Event()
    asyncio.get_running_loop().set_default_executor(threads)
    threads.submit(may_go_on.wait, HANG_S)
    releasing = asyncio.create_task(release_on_thread(released.set))
    await asyncio.sleep(0)
    releasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await releasing
    may_go_on.set()
    assert await asyncio.to_thread(released.wait, HANG_S)
