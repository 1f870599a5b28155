"""Tasks that run alongside a block and end with it, that are awaited together, or that repeat."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from torchrelay.common.errors import TorchrelayError
from torchrelay.common.process.telemetry import get_logger

log = get_logger(__name__)


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


async def repeat(name: str, work: Callable[[], Awaitable[object]], every_s: float) -> None:
    """Calls ``work`` until cancelled, with pauses of ``every_s``.

    A call that fails is logged and followed by another: it must not end the gateway and its streams.
    """
    while True:
        try:
            await work()
        except TorchrelayError as error:
            log.warning("job_failed", job=name, error=error.message)
        except Exception:
            log.exception("job_crashed", job=name)
        await asyncio.sleep(every_s)
