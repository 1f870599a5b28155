from __future__ import annotations

import asyncio

from tests.unit.gateway.conftest import AccountingRig
from torchrelay.gateway.sql.table_versions import TableVersions, bump_version


async def test_a_version_rises_with_the_transaction_that_raises_it(parts: AccountingRig) -> None:
    before = await parts.table_versions.confirmed("catalog")
    async with parts.database.write() as connection:
        await bump_version(connection, "catalog")
    assert await parts.table_versions.confirmed("catalog") == before  # confirmed a moment ago
    parts.table_versions.invalidate()
    assert await parts.table_versions.confirmed("catalog") == before + 1
    assert await parts.table_versions.confirmed("keys") == 1


async def test_many_waiters_ask_once(parts: AccountingRig) -> None:
    asked = 0

    class Counting(TableVersions):
        async def _query(self) -> None:
            nonlocal asked
            asked += 1
            await super()._query()

    table_versions = Counting(parts.database, 60)
    await asyncio.gather(*(table_versions.confirmed("keys") for _ in range(20)))
    assert asked == 1


async def test_a_doubt_during_the_question_makes_its_answer_good_once_only(parts: AccountingRig) -> None:
    num_asked = 0

    class Doubted(TableVersions):
        async def _query(self) -> None:
            nonlocal num_asked
            num_asked += 1
            if num_asked == 1:
                asking = asyncio.create_task(super()._query())
                await asyncio.sleep(0)
                self.invalidate()
                await asking
            else:
                await super()._query()

    table_versions = Doubted(parts.database, 60)
    for _ in range(3):
        await table_versions.confirmed("keys")
    assert num_asked == 2
