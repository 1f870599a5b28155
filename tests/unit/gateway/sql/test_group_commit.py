"""Group commit: linger under load, shared transactions, isolated failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
from sqlalchemy import Connection, update

from tests.support.silent_proxy import SilentProxy
from tests.support.wait import HANG_S
from torchrelay.common.errors import NotFound, Unavailable
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.group_commit import GroupCommit, Result, linger_s
from torchrelay.gateway.sql.tables import table_versions

T = TypeVar("T")


def test_linger_grows_with_the_last_batch() -> None:
    assert linger_s(0, 0.0) == linger_s(1, 0.0) == 0.0
    assert 0.0 < linger_s(2, 0.0) < linger_s(8, 0.0) < linger_s(100, 0.0)
    assert linger_s(100, 0.0) == linger_s(10_000, 0.0) < 0.05


def test_linger_is_zero_after_a_pause() -> None:
    assert linger_s(100, 1.0) == 0.0


async def test_waiting_writes_share_a_transaction(database: Database) -> None:
    batches: list[int] = []

    def apply(connection: Connection, writes: Sequence[int]) -> dict[int, Result]:
        batches.append(len(writes))
        connection.execute(update(table_versions).values(version=table_versions.c.version + len(writes)))
        return {index: NotFound("odd") if write % 2 else write * 10 for index, write in enumerate(writes)}

    async with GroupCommit(database, apply) as commits:
        answers = await asyncio.gather(*map(commits.do, range(40)), return_exceptions=True)
        assert await commits.do(100) == 1000
    assert answers[::2] == [write * 10 for write in range(0, 40, 2)]
    assert all(isinstance(answer, NotFound) for answer in answers[1::2])
    assert sum(batches) == 41 and len(batches) <= 3


async def test_write_that_breaks_its_transaction_fails_alone(database: Database) -> None:
    def apply(connection: Connection, writes: Sequence[int]) -> dict[int, Result]:
        connection.execute(update(table_versions).values(version=table_versions.c.version + len(writes)))
        return {index: 10 // write for index, write in enumerate(writes)}

    async with GroupCommit(database, apply) as commits:
        answers = await asyncio.gather(*map(commits.do, (1, 0, 5)), return_exceptions=True)
        assert (answers[0], answers[2]) == (10, 2)
        assert isinstance(answers[1], ZeroDivisionError)
        with pytest.raises(ZeroDivisionError):
            await commits.do(0)
    versions = await database.transact(lambda connection: connection.execute(table_versions.select()).all())
    assert {row.version for row in versions} == {1 + 2}  # the failed writes were rolled back


class CountingDatabase(Database):
    num_transactions = 0

    async def transact(self, work: Callable[[Connection], T]) -> T:
        self.num_transactions += 1
        return await super().transact(work)


async def test_queued_writes_fail_with_a_silent_database(postgres_url: str) -> None:
    async with SilentProxy(postgres_url).serving() as proxy:
        database = CountingDatabase(proxy.url, time_limit_s=1.0)
        async with GroupCommit[int](database, lambda _, writes: dict.fromkeys(range(len(writes)), 0)) as commits:
            assert await commits.do(1) == 0
            proxy.fall_silent()
            num_before = database.num_transactions
            answers = await asyncio.gather(*map(commits.do, range(2560)), return_exceptions=True)  # ten batches
            assert all(isinstance(answer, Unavailable) for answer in answers)
            assert database.num_transactions == num_before + 1, "further batches waited for the time limit as well"
            proxy.speak()
            async with asyncio.timeout(HANG_S):
                while (await asyncio.gather(commits.do(1), return_exceptions=True))[0] != 0:
                    pass
        await database.close()
