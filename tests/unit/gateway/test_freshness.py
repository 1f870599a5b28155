from __future__ import annotations

import asyncio

from tests.unit.gateway.conftest import Parts
from torchrelay.gateway.freshness import TableVersions, raise_version


async def test_a_version_rises_with_the_transaction_that_raises_it(parts: Parts) -> None:
    before = await parts.freshness.confirmed("catalogue")
    async with parts.database.write() as connection:
        await raise_version(connection, "catalogue")
    assert await parts.freshness.confirmed("catalogue") == before  # confirmed a moment ago
    parts.freshness.doubt()
    assert await parts.freshness.confirmed("catalogue") == before + 1
    assert await parts.freshness.confirmed("keys") == 1


async def test_many_waiters_ask_once(parts: Parts) -> None:
    asked = 0

    class Counting(TableVersions):
        async def _ask(self) -> None:
            nonlocal asked
            asked += 1
            await super()._ask()

    freshness = Counting(parts.database, 60)
    await asyncio.gather(*(freshness.confirmed("keys") for _ in range(20)))
    assert asked == 1


async def test_a_doubt_during_the_question_makes_its_answer_good_once_only(parts: Parts) -> None:
    num_asked = 0

    class Doubted(TableVersions):
        async def _ask(self) -> None:
            nonlocal num_asked
            num_asked += 1
            if num_asked == 1:
                asking = asyncio.create_task(super()._ask())
                await asyncio.sleep(0)
                self.doubt()
                await asking
            else:
                await super()._ask()

    freshness = Doubted(parts.database, 60)
    for _ in range(3):
        await freshness.confirmed("keys")
    assert num_asked == 2
