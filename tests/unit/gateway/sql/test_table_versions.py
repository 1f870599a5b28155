from __future__ import annotations

import asyncio

import pytest

from tests.support.silent_proxy import SilentProxy
from tests.unit.gateway.conftest import AccountingRig
from torchrelay.common.errors import Unavailable
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.table_versions import TableVersions, bump_version
from torchrelay.gateway.sql.versioned_cache import VersionedCache


async def test_version_rises_when_its_transaction_commits(parts: AccountingRig) -> None:
    before = await parts.table_versions.confirmed("catalog")
    async with parts.database.write() as connection:
        await bump_version(connection, "catalog")
    assert await parts.table_versions.confirmed("catalog") == before  # confirmed a moment ago
    parts.table_versions.invalidate()
    assert await parts.table_versions.confirmed("catalog") == before + 1
    assert await parts.table_versions.confirmed("keys") == 1


async def test_concurrent_callers_share_a_query(parts: AccountingRig) -> None:
    asked = 0

    class Counting(TableVersions):
        async def _query(self) -> None:
            nonlocal asked
            asked += 1
            await super()._query()

    table_versions = Counting(parts.database, 60)
    await asyncio.gather(*(table_versions.confirmed("keys") for _ in range(20)))
    assert asked == 1


async def test_invalidation_during_a_query_causes_another(parts: AccountingRig) -> None:
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


async def test_abandoned_query_ends_before_the_database_closes(postgresql_url: str) -> None:
    has_ended = False

    class Noted(TableVersions):
        async def _query(self) -> None:
            nonlocal has_ended
            try:
                await super()._query()
            finally:
                has_ended = True

    async with SilentProxy(postgresql_url).serving() as proxy:
        database = Database(proxy.url)
        versions = Noted(database, 0.5)
        await versions.confirmed("keys")
        has_ended = False
        versions.invalidate()
        proxy.fall_silent()
        with pytest.raises(Unavailable, match="does not answer"):
            await versions.confirmed("keys")
        assert not has_ended
        await database.close()
        assert has_ended


def test_entry_is_valid_for_its_version_only() -> None:
    cache: VersionedCache[str, int] = VersionedCache(2)
    cache.put("a", 1, 10)
    assert cache.get("a", 1) == 10
    assert cache.get("a", 2) is None
    cache.put("a", 2, 11)
    assert cache.get("a", 2) == 11


def test_cache_evicts_the_least_recently_used() -> None:
    cache: VersionedCache[str, int] = VersionedCache(2)
    cache.put("a", 1, 1)
    cache.put("b", 1, 2)
    cache.get("a", 1)
    cache.put("c", 1, 3)
    assert (cache.get("a", 1), cache.get("b", 1), cache.get("c", 1)) == (1, None, 3)
