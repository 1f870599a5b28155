"""Group commit: all writes pending when a transaction begins share it.

A single write is committed at once. Under load each transaction waits for more writes, the longer the larger the last
batch was: a transaction costs as much as twenty writes within one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Self, TypeAlias, TypeVar

from sqlalchemy import Connection

from torchrelay.common.errors import TorchrelayError, Unavailable
from torchrelay.gateway.sql.database import Database, is_silence

_MAX_QUEUED_WRITES = 10_000  # over all running requests; beyond it callers wait
_MAX_BATCH_WRITES = 256
_LINGER_S = 0.002  # per write of the last batch
_MAX_LINGER_S = 0.032

W = TypeVar("W")
Result: TypeAlias = int | TorchrelayError
Apply: TypeAlias = Callable[[Connection, Sequence[W]], Mapping[int, Result]]


def linger_s(num_last: int, idle_s: float) -> float:
    """How long to wait for more writes after a batch of ``num_last`` writes and ``idle_s`` without any."""
    if num_last <= 1 or idle_s > _MAX_LINGER_S:
        return 0.0
    return min(num_last * _LINGER_S, _MAX_LINGER_S)


class GroupCommit(Generic[W]):
    """Owns the committing task. An async context manager; on exit it commits pending writes.

    ``apply`` performs a batch of writes within one transaction and returns their results by index; a result that is
    an error is raised to its caller alone.
    """

    def __init__(self, database: Database, apply: Apply[W]) -> None:
        self._database = database
        self._apply = apply
        self._waiting: asyncio.Queue[tuple[W, asyncio.Future[int]] | None] = asyncio.Queue(_MAX_QUEUED_WRITES)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="group-commit")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._task is not None:
            task, self._task = self._task, None
            await self._waiting.put(None)
            await task

    async def do(self, write: W) -> int:
        """The result of ``write`` once committed. Raises its error, or ``Unavailable`` without SQL.

        The write of a caller cancelled meanwhile may still be committed.
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
        """Commits the batch. If it fails, commits each write on its own, so that only the faulty one fails."""
        if not batch:
            return
        writes = [write for write, _ in batch]
        try:
            results = await self._database.transact(lambda connection: self._apply(connection, writes))
        except Unavailable as error:
            for _, done in [*batch, *self._waiting_behind(error)]:
                _resolve(done, error)
        except Exception as error:  # raised to the callers
            if len(batch) == 1:
                _resolve(batch[0][1], error)
                return
            for entry in batch:
                await self._commit([entry])
        else:
            for index, (_, done) in enumerate(batch):
                _resolve(done, results[index])

    def _waiting_behind(self, error: Unavailable) -> list[tuple[W, asyncio.Future[int]]]:
        """The queued writes, if the database is silent: otherwise each further batch would wait for it again."""
        entries: list[tuple[W, asyncio.Future[int]]] = []
        while is_silence(error) and not self._waiting.empty():
            if (entry := self._waiting.get_nowait()) is None:
                self._waiting.put_nowait(None)  # the end, for ``_run``
                break
            entries.append(entry)
        return entries


def _resolve(done: asyncio.Future[int], result: int | Exception) -> None:
    if done.done():  # the caller was cancelled
        return
    if isinstance(result, Exception):
        done.set_exception(result)
    else:
        done.set_result(result)
