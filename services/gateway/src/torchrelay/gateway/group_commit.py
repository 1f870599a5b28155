"""Many small writes, few commits: whatever waits when a transaction begins is committed with it.

A write that comes alone is committed at once; where they come in numbers, each transaction waits a moment for more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Generic, TypeAlias, TypeVar

from torchrelay.common.errors import TorchrelayError, Unavailable
from torchrelay.gateway.sql.database import Database, SqlConnection

_MOST_WAITING = 10_000  # writes of all running requests together; beyond it a caller waits for room
_MOST_IN_ONE = 256
_LINGER_S = 0.008  # a transaction costs a dozen thread switches: under load, a few writes more share one

W = TypeVar("W")
Result: TypeAlias = int | TorchrelayError
Apply: TypeAlias = Callable[[SqlConnection, Sequence[W]], Awaitable[Mapping[int, Result]]]


class GroupCommit(Generic[W]):
    """Owns the one task that commits. Entered before use; leaving it commits what waits, then ends the task.

    ``apply`` does a batch of writes within one transaction and returns their results by index; a result that is an
    error is raised to its caller alone.
    """

    def __init__(self, database: Database, apply: Apply[W]) -> None:
        self._database = database
        self._apply = apply
        self._waiting: asyncio.Queue[tuple[W, asyncio.Future[int]] | None] = asyncio.Queue(_MOST_WAITING)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> GroupCommit[W]:
        self._task = asyncio.create_task(self._run(), name="group-commit")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._task is not None:
            task, self._task = self._task, None
            await self._waiting.put(None)
            await task

    async def do(self, write: W) -> int:
        """The result of ``write`` once it is committed. Raises its error, or ``Unavailable`` when SQL is away.

        A caller that is cancelled while it waits leaves its write in place: it may be committed all the same.
        """
        if self._task is None:
            raise Unavailable("the gateway is shutting down")
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        await self._waiting.put((write, done))
        return await done

    async def _run(self) -> None:
        is_open, is_busy = True, False
        while is_open:
            batch = [await self._waiting.get()]
            if is_busy and batch[0] is not None:
                await asyncio.sleep(_LINGER_S)
            while len(batch) < _MOST_IN_ONE and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            is_open, is_busy = None not in batch, len(batch) > 1
            await self._commit([entry for entry in batch if entry is not None])

    async def _commit(self, batch: list[tuple[W, asyncio.Future[int]]]) -> None:
        """Commits the batch whole; when one write in it breaks it, each on its own, so that only that one fails."""
        if not batch:
            return
        try:
            async with self._database.write() as connection:
                results = await self._apply(connection, [write for write, _ in batch])
        except Unavailable as error:
            for _, done in batch:
                _hand_out(done, error)
        except Exception as error:  # not swallowed: the callers get it
            if len(batch) == 1:
                _hand_out(batch[0][1], error)
                return
            for entry in batch:
                await self._commit([entry])
        else:
            for index, (_, done) in enumerate(batch):
                _hand_out(done, results[index])


def _hand_out(done: asyncio.Future[int], result: int | Exception) -> None:
    if done.done():  # the caller left
        return
    if isinstance(result, Exception):
        done.set_exception(result)
    else:
        done.set_result(result)
