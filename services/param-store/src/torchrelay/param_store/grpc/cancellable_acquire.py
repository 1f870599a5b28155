"""Acquires a resource on a thread, in a call that its client may cancel at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def acquire_on_thread(acquire: Callable[[], T], release: Callable[[T], object]) -> T:
    """What ``acquire`` returns, called on a thread; if the caller is cancelled, ``release`` gets it instead."""
    # A thread cannot be cancelled: what it acquires after the caller has gone would never be released.
    running = asyncio.get_running_loop().run_in_executor(None, acquire)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        running.add_done_callback(lambda ended: _release(ended, release))
        raise


def _release(ended: asyncio.Future[T], release: Callable[[T], object]) -> None:
    if not ended.cancelled() and ended.exception() is None:
        release(ended.result())
