"""Polling for the effects of other processes and threads, which offer no event to wait for.

The limit stands only against hanging: it is far above what any effect takes on a busy machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine

HANG_S = 60.0
_INTERVAL_S = 0.005


async def eventually(condition: Callable[[], object], what: str = "the condition", limit_s: float = HANG_S) -> None:
    """Returns once ``condition()``, awaited if it is a coroutine, is true.

    Raises ``AssertionError``, which names ``what``, after ``limit_s``.
    """
    try:
        async with asyncio.timeout(limit_s) as limit:
            while True:
                value = condition()
                if await value if isinstance(value, Coroutine) else value:
                    return
                await asyncio.sleep(_INTERVAL_S)
    except TimeoutError:
        assert not limit.expired(), f"{what} did not come true within {limit_s:g} s"
        raise


def wait_until(condition: Callable[[], object], what: str = "the condition", limit_s: float = HANG_S) -> None:
    """``eventually`` for a thread without an event loop."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {limit_s:g} s"
        time.sleep(_INTERVAL_S)
