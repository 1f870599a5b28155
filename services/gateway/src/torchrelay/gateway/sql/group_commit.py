"""Many small writes, few commits: whatever waits when a transaction begins is committed with it.

A write that comes alone is committed at once. Where they come in numbers, each transaction waits for more of them: the
longer the more came last, for then waiting brings many, and a transaction costs as much as twenty writes in one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeAlias, TypeVar

from sqlalchemy import Connection

from torchrelay.common.errors import TorchrelayError, Unavailable
from torchrelay.gateway.sql.database import Database

_MAX_QUEUED_WRITES = 10_000  # writes of all running requests together; beyond it a caller waits for room
_MAX_BATCH_WRITES = 256
_LINGER_S = 0.002  # for each write of the last transaction
_MAX_LINGER_S = 0.032

W = TypeVar("W")
Result: TypeAlias = int | TorchrelayError
Apply: TypeAlias = Callable[[Connection, Sequence[W]], Mapping[int, Result]]


def linger_s(num_last: int, idle_s: float) -> float:
    """How long a transaction waits for more writes: the last had ``num_last``, and then none came for ``idle_s``."""
    if num_last <= 1 or idle_s > _MAX_LINGER_S:
        return 0.0
    return min(num_last * _LINGER_S, _MAX_LINGER_S)


class GroupCommit(Generic[W]):
    """Owns the one task that commits. Entered before use; leaving it commits what waits, then ends the task.

    ``apply`` does a batch of writes within one transaction and returns their results by index; a result that is an
    error is raised to its caller alone.
    """

    def __init__(self, database: Database, apply: Apply[W]) -> None:
        self._database = database
        self._apply = apply
        self._waiting: asyncio.Queue[tuple[W, asyncio.Future[int]] | None] = asyncio.Queue(_MAX_QUEUED_WRITES)
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
        clock = asyncio.get_running_loop().time
        is_open, num_last = True, 0
        while is_open:
            idle_since = clock()
            batch = [await self._waiting.get()]
            wait_s = linger_s(num_last, clock() - idle_since)
            if batch[0] is not None and wait_s:
                await asyncio.sleep(wait_s)
            while len(batch) < _MAX_BATCH_WRITES and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            is_open, num_last = None not in batch, len(batch)
            await self._commit([entry for entry in batch if entry is not None])

    async def _commit(self, batch: list[tuple[W, asyncio.Future[int]]]) -> None:
        """Commits the batch whole; when one write in it breaks it, each on its own, so that only that one fails."""
        if not batch:
            return
        writes = [write for write, _ in batch]
        try:
            results = await self._database.transact(lambda connection: self._apply(connection, writes))
        except Unavailable as error:
            for _, done in batch:
                _resolve(done, error)
        except Exception as error:  # not swallowed: the callers get it
            if len(batch) == 1:
                _resolve(batch[0][1], error)
                return
            for entry in batch:
                await self._commit([entry])
        else:
            for index, (_, done) in enumerate(batch):
                _resolve(done, results[index])


def _resolve(done: asyncio.Future[int], result: int | Exception) -> None:
    if done.done():  # the caller left
        return
    if isinstance(result, Exception):
        done.set_exception(result)
    else:
        done.set_result(result)
