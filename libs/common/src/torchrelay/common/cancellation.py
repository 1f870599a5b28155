"""Cancellation around awaits that swallow it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

_RETRY_S = 0.1

T = TypeVar("T")


def raise_if_cancelled() -> None:
    """Re-raises a cancellation that an await has swallowed; call it in loops after such an await."""
    # nats-py's ``publish`` returns normally when cancelled while it waits for a stalled broker: a loop would not end.
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def cancellable(work: Coroutine[Any, Any, T]) -> T:
    """Awaits ``work``; a cancellation of the caller always ends it, and drops its result.

    Until Python 3.12 ``asyncio.wait_for``, which nats-py uses, swallows a cancellation that arrives as its future
    completes: ``work`` would continue. Here it is a task that is cancelled again until it ends.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):  # a second cancellation must not end the wait
                await asyncio.wait({task}, timeout=_RETRY_S)
        if not task.cancelled():
            task.exception()
        raise
