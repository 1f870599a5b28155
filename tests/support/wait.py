"""Polling for the effects of other processes and threads, which offer no event to wait for.

The limit stands only against hanging: it is far above what any effect takes on a busy machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from inspect import isawaitable

HANG_S = 120.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.25


async def eventually(condition: Callable[[], object], what: str = "the condition", limit_s: float = HANG_S) -> None:
    """Returns once ``condition()``, awaited if it is awaitable, is true.

    Raises ``AssertionError``, which names ``what``, after ``limit_s``.
    """
    try:
        async with asyncio.timeout(limit_s) as limit:
            for pause_s in _pauses_s():
                value = condition()
                if await value if isawaitable(value) else value:
                    return
                await asyncio.sleep(pause_s)
    except TimeoutError:
        assert not limit.expired(), f"{what} did not come true within {limit_s:g} s"
        raise


def wait_until(condition: Callable[[], object], what: str = "the condition", limit_s: float = HANG_S) -> None:
    """``eventually`` for a thread without an event loop."""
    deadline = time.monotonic() + limit_s
    for pause_s in _pauses_s():
        if condition():
            return
        assert time.monotonic() < deadline, f"{what} did not come true within {limit_s:g} s"
        time.sleep(pause_s)


def _pauses_s() -> Iterator[float]:
    """Pauses between looks, a tenth of the wait so far: a long wait must not take CPU from the awaited."""
    began = time.monotonic()
    while True:
        yield min(max(_SHORTEST_PAUSE_S, (time.monotonic() - began) / 10), _LONGEST_PAUSE_S)
