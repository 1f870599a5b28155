"""Waiting for more writes pays under load only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest
from sqlalchemy import Connection, update

from tests.support.silent_proxy import SilentProxy
from torchrelay.common.errors import NotFound, Unavailable
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.group_commit import GroupCommit, Result, linger_s
from torchrelay.gateway.sql.tables import table_versions


def test_a_transaction_waits_the_longer_the_more_came_last() -> None:
    assert linger_s(0, 0.0) == linger_s(1, 0.0) == 0.0
    assert 0.0 < linger_s(2, 0.0) < linger_s(8, 0.0) < linger_s(100, 0.0)
    assert linger_s(100, 0.0) == linger_s(10_000, 0.0) < 0.05


def test_who_comes_after_a_pause_does_not_wait() -> None:
    assert linger_s(100, 1.0) == 0.0


async def test_writes_that_wait_together_share_a_transaction_and_each_gets_its_own_answer(database: Database) -> None:
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


async def test_a_write_that_breaks_its_transaction_fails_alone(database: Database) -> None:
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


async def test_who_waits_behind_a_silent_database_waits_for_it_once(postgres_url: str) -> None:
    async with SilentProxy(postgres_url).serving() as proxy:
        database = Database(proxy.url, time_limit_s=1.0)
        async with GroupCommit[int](database, lambda _, writes: dict.fromkeys(range(len(writes)), 0)) as commits:
            assert await commits.do(1) == 0
            proxy.fall_silent()
            begin_s = time.monotonic()
            answers = await asyncio.gather(*map(commits.do, range(2560)), return_exceptions=True)  # ten batches
            took_s = time.monotonic() - begin_s
            assert all(isinstance(answer, Unavailable) for answer in answers) and took_s < 6
            proxy.speak()
            async with asyncio.timeout(20):
                while (await asyncio.gather(commits.do(1), return_exceptions=True))[0] != 0:
                    pass
        await database.close()
