"""Tasks that run alongside a block and end with it."""

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
