"""Taking something on a thread, in a call that its client may cancel at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def acquire_on_thread(acquire: Callable[[], T], release: Callable[[T], object]) -> T:
    """What ``taking`` returns, run on a thread. A cancelled caller never sees it, so it is given back then.

    A thread cannot be cancelled: without this, what it takes after the caller has gone would stay taken for ever.
    """
    running = asyncio.get_running_loop().run_in_executor(None, acquire)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        running.add_done_callback(lambda ended: _release(ended, release))
        raise


def _release(ended: asyncio.Future[T], release: Callable[[T], object]) -> None:
    if not ended.cancelled() and ended.exception() is None:
        release(ended.result())
