"""Repeats progress while there is none, so that its receiver can distinguish slow from hung."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

T = TypeVar("T")


async def repeated(steps: AsyncGenerator[T], first: T, every_s: float) -> AsyncGenerator[T]:
    """Yields ``steps``, and repeats the last step (initially ``first``) whenever ``every_s`` pass without a new step.

    Closing it cancels the pending step and closes ``steps``.
    """
    last = first
    next_step = asyncio.ensure_future(anext(steps, None))
    try:
        while True:
            if (await asyncio.wait({next_step}, timeout=every_s))[0]:
                step = next_step.result()
                if step is None:
                    return
                last = step
                next_step = asyncio.ensure_future(anext(steps, None))
            yield last
    finally:
        next_step.cancel()
        await asyncio.gather(next_step, return_exceptions=True)
        await steps.aclose()
