"""Acquires and releases a resource on a thread, for a call that may be cancelled at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def acquire_on_thread(acquire: Callable[[], T], release: Callable[[T], object]) -> T:
    """Calls ``acquire`` on a thread and returns its result; if the caller is cancelled, releases the result instead."""
    # A thread cannot be cancelled: a resource that it acquires after the cancellation would never be released.
    running = asyncio.get_running_loop().run_in_executor(None, acquire)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        running.add_done_callback(lambda ended: _release(ended, release))
        raise


async def release_on_thread(release: Callable[[], object]) -> None:
    """Calls ``release`` on a thread, which no cancellation prevents: a cancelled ``to_thread`` may never begin."""
    await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, release))


def _release(ended: asyncio.Future[T], release: Callable[[T], object]) -> None:
    if not ended.cancelled() and ended.exception() is None:
        release(ended.result())
