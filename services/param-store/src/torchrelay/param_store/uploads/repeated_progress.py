"""Progress that is told again while nothing new happens, so that its receiver can tell slow from hung."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

T = TypeVar("T")


async def repeated(steps: AsyncGenerator[T], first: T, every_s: float) -> AsyncGenerator[T]:
    """``steps``, and the last of them (before the first, ``first``) again whenever ``every_s`` pass without one.

    Closing it cancels what ``steps`` waits for and closes ``steps``.
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
