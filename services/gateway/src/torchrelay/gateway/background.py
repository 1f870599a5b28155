"""Tasks that run alongside a block and end with it, or that are awaited together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def background(*jobs: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs ``jobs`` until the block ends, then cancels and awaits them. A failing job ends the block."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(job) for job in jobs]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def all_ended(*jobs: Coroutine[Any, Any, None]) -> None:
    """Runs ``jobs`` side by side until each has ended; only then raises the errors of those that failed."""
    results = await asyncio.gather(*jobs, return_exceptions=True)
    if errors := [result for result in results if result is not None]:
        raise BaseExceptionGroup("jobs failed", errors)
