"""Work on several inputs at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
Input = TypeVar("Input")


async def run_all(
    inputs: Sequence[Input], work: Callable[[Input], Awaitable[T]], at_once: int | None = None
) -> list[T]:
    """The result of ``work`` for each input, ``at_once`` or all at a time. Raises the first error, and cancels the
    rest.
    """
    if len(inputs) == 1:
        return [await work(inputs[0])]
    turns = asyncio.Semaphore(at_once or len(inputs))

    async def in_turn(given: Input) -> T:
        async with turns:
            return await work(given)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(in_turn(given)) for given in inputs]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
