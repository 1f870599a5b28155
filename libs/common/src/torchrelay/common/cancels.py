"""Cancellation that is always heard, for awaits that may be deaf to it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_AGAIN_S = 0.1

T = TypeVar("T")


async def heeding(work: Coroutine[Any, Any, T]) -> T:
    """Awaits ``work``; a cancellation of the caller always ends it.

    ``asyncio.wait_for``, on which nats-py rests, swallows a cancellation that comes as its future is done (until Python
    3.12): ``work`` would go on, and whoever waits for its end would wait for ever. Here it is a task of its own, told
    again until it ends; what it returned all the same is dropped.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_AGAIN_S)
        raise
