"""Cancellation that is always heard, for awaits that may be deaf to it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

_RETRY_S = 0.1

T = TypeVar("T")


def raise_if_cancelled() -> None:
    """Raises the cancellation of the running task that an await has swallowed; for loops, after such an await.

    nats-py returns from ``publish`` as if nothing were, when it is cancelled while it waits for a broker that reads
    nothing: a loop that publishes would never end.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def cancellable(work: Coroutine[Any, Any, T]) -> T:
    """Awaits ``work``; a cancellation of the caller always ends it.

    ``asyncio.wait_for``, on which nats-py rests, swallows a cancellation that comes as its future is done (until Python
    3.12): ``work`` would go on, and whoever waits for its end would wait for ever. Here it is a task of its own, told
    again until it ends; what it returned or raised all the same is dropped.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):  # another one ends the wait no sooner
                await asyncio.wait({task}, timeout=_RETRY_S)
        if not task.cancelled():
            task.exception()
        raise
