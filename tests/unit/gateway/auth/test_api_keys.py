from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import asyncpg
import pytest

from tests.support.silent_proxy import SilentProxy
from tests.support.wait import eventually
from tests.unit.gateway.conftest import PEPPER, AccountingRig, Clock
from torchrelay.common.errors import NotFound, Unauthenticated, Unavailable
from torchrelay.gateway.auth.api_keys import ApiKeys, load_pepper
from torchrelay.gateway.auth.tenants import Tenants
from torchrelay.gateway.core import ServiceClass, ServiceClassName
from torchrelay.gateway.sql.database import ANSWER_LIMIT_S, Database
from torchrelay.gateway.sql.table_versions import TableVersions

T = TypeVar("T")


async def test_key_authenticates_its_tenant(parts: AccountingRig) -> None:
    info, token = await parts.keys.create("acme", parts.acme.tenant_id, "laptop", requests_per_minute=7)
    principal = await parts.keys.authenticate(f"Bearer {token}")
    assert (principal.tenant_id, principal.tenant) == (parts.acme.tenant_id, "acme")
    assert (principal.key_id, principal.requests_per_minute, principal.is_admin) == (info.key_id, 7, False)
    assert await parts.keys.authenticate(f"bearer {token}") == principal


@pytest.mark.parametrize(
    ("of_key", "of_tenant", "service_class"),
    [
        (None, None, ServiceClass.STANDARD),
        (None, "batch", ServiceClass.BATCH),
        ("interactive", "batch", ServiceClass.INTERACTIVE),
        ("standard", "batch", ServiceClass.STANDARD),
        ("batch", None, ServiceClass.BATCH),
    ],
)
async def test_class_of_the_key_precedes_the_tenants(
    parts: AccountingRig,
    of_key: ServiceClassName | None,
    of_tenant: ServiceClassName | None,
    service_class: ServiceClass,
) -> None:
    zoo = await parts.tenants.create("zoo", service_class=of_tenant)
    info, token = await parts.keys.create("zoo", zoo.tenant_id, service_class=of_key)
    assert (await parts.keys.authenticate(f"Bearer {token}")).service_class is service_class
    assert await parts.keys.list(zoo.tenant_id) == [info]


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic abc", "Bearer tra-wrong", "Bearer tr-x-y"])
async def test_other_headers_are_unauthenticated(parts: AccountingRig, header: str | None) -> None:
    with pytest.raises(Unauthenticated):
        await parts.keys.authenticate(header)


async def test_last_known_principal_needs_no_query(parts: AccountingRig) -> None:
    info, token = await parts.keys.create("acme", parts.acme.tenant_id)
    assert parts.keys.last_known(f"Bearer {token}") is None, "nobody has asked SQL about it"
    principal = await parts.keys.authenticate(f"Bearer {token}")
    assert parts.keys.last_known(f"Bearer {token}") == principal
    forged = f"Bearer {token[:-1]}{'a' if token[-1] != 'a' else 'b'}"
    assert all(parts.keys.last_known(other) is None for other in (forged, token, "Bearer ", ""))
    assert parts.keys.last_known("Bearer tra-test") == await parts.keys.authenticate("Bearer tra-test")
    await parts.keys.revoke(info.key_id, None)
    with pytest.raises(Unauthenticated):
        await parts.keys.authenticate(f"Bearer {token}")
    assert parts.keys.last_known(f"Bearer {token}") is None


async def test_key_of_another_installation_is_refused(parts: AccountingRig) -> None:
    _, token = await parts.keys.create("acme", parts.acme.tenant_id)
    other = ApiKeys(parts.database, parts.table_versions, b"other pepper")
    with pytest.raises(Unauthenticated):
        await other.authenticate(f"Bearer {token}")


async def test_admin_key_comes_from_the_setting(parts: AccountingRig) -> None:
    assert (await parts.keys.authenticate("Bearer tra-test")).is_admin
    without = ApiKeys(parts.database, parts.table_versions, PEPPER, admin_key="")
    with pytest.raises(Unauthenticated):
        await without.authenticate("Bearer tra-test")


async def test_revoked_key_is_refused_at_once(parts: AccountingRig) -> None:
    info, token = await parts.keys.create("acme", parts.acme.tenant_id)
    await parts.keys.authenticate(f"Bearer {token}")
    await parts.keys.revoke(info.key_id, parts.acme.tenant_id)
    await parts.keys.revoke(info.key_id, None)
    with pytest.raises(Unauthenticated):
        await parts.keys.authenticate(f"Bearer {token}")
    assert [key.is_revoked for key in await parts.keys.list(parts.acme.tenant_id)] == [True]


async def test_another_tenants_key_cannot_be_revoked_or_listed(parts: AccountingRig) -> None:
    other = await parts.tenants.create("other")
    info, token = await parts.keys.create("acme", parts.acme.tenant_id)
    with pytest.raises(NotFound):
        await parts.keys.revoke(info.key_id, other.tenant_id)
    assert await parts.keys.list(other.tenant_id) == []
    assert await parts.keys.authenticate(f"Bearer {token}")


async def test_other_gateway_refuses_a_revoked_key_after_confirmation(
    parts: AccountingRig,
) -> None:
    clock = Clock()
    elsewhere = ApiKeys(parts.database, TableVersions(parts.database, 0.5, clock), PEPPER)
    info, token = await parts.keys.create("acme", parts.acme.tenant_id)
    await elsewhere.authenticate(f"Bearer {token}")
    await parts.keys.revoke(info.key_id, None)
    clock.now += 0.49  # still trusted: no hint, and confirmed less than half a second ago
    await elsewhere.authenticate(f"Bearer {token}")
    clock.now += 0.01
    with pytest.raises(Unauthenticated):
        await elsewhere.authenticate(f"Bearer {token}")


async def test_hint_makes_a_revocation_instant(parts: AccountingRig) -> None:
    clock = Clock()
    table_versions = TableVersions(parts.database, 0.5, clock)
    elsewhere = ApiKeys(parts.database, table_versions, PEPPER)

    async def hint() -> None:
        table_versions.invalidate()

    here = ApiKeys(parts.database, parts.table_versions, PEPPER, announce=hint)
    info, token = await here.create("acme", parts.acme.tenant_id)
    await elsewhere.authenticate(f"Bearer {token}")
    await here.revoke(info.key_id, None)
    with pytest.raises(Unauthenticated):
        await elsewhere.authenticate(f"Bearer {token}")


async def test_cached_key_needs_no_sql_until_its_confirmation_is_old(parts: AccountingRig) -> None:
    clock = Clock()
    table_versions = TableVersions(parts.database, 0.5, clock)
    keys = ApiKeys(parts.database, table_versions, PEPPER)
    _, token = await keys.create("acme", parts.acme.tenant_id)
    await keys.authenticate(f"Bearer {token}")
    parts.database.interrupt()
    await keys.authenticate(f"Bearer {token}")
    clock.now += 0.5
    with pytest.raises(Unavailable):
        await keys.authenticate(f"Bearer {token}")


async def test_pepper_is_created_once_and_shared(database: Database) -> None:
    first = await load_pepper(database, "")
    assert len(first) == 32
    assert await load_pepper(database, "") == first
    assert await load_pepper(database, "00ff") == b"\x00\xff"


FIRST_ANSWER_S = 0.4 * ANSWER_LIMIT_S


class LimitedDatabase(Database):
    """A database that records the time limits of its answers."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.limits_s: list[float] = []

    async def answer(self, query: Coroutine[Any, Any, T], time_limit_s: float = ANSWER_LIMIT_S) -> T:
        self.limits_s.append(time_limit_s)
        return await super().answer(query, time_limit_s)


async def test_silent_database_costs_each_caller_one_time_limit(postgres_url: str) -> None:
    async with SilentProxy(postgres_url).serving() as proxy:
        database, clock = LimitedDatabase(proxy.url), Clock()
        versions = TableVersions(database, confirm_s=0.5, clock=clock)
        keys, tenants = ApiKeys(database, versions, PEPPER), Tenants(database, versions)
        tenant_id = (await tenants.create("acme")).tenant_id
        tokens = [(await keys.create("acme", tenant_id))[1] for _ in range(2)]
        await keys.authenticate(f"Bearer {tokens[0]}")
        proxy.fall_silent()
        await keys.authenticate(f"Bearer {tokens[0]}")  # confirmed a moment ago
        database.limits_s.clear()
        await assert_refused(keys, tokens[1])  # not cached
        clock.now += 1
        for _ in range(2):
            async with asyncio.timeout(10 * ANSWER_LIMIT_S):  # half of what the callers would wait one by one
                await asyncio.gather(*(assert_refused(keys, token) for token in tokens * 10))
        assert len(database.limits_s) == 1 + 20 + 20 and max(database.limits_s) <= ANSWER_LIMIT_S
        proxy.speak()
        await until_authenticated(keys, tokens[0])
        await database.close()


async def test_two_queries_share_one_time_limit(postgres_url: str) -> None:
    database = LimitedDatabase(postgres_url)
    versions = TableVersions(database, confirm_s=0.5)
    keys, tenants = ApiKeys(database, versions, PEPPER), Tenants(database, versions)
    token = (await keys.create("acme", (await tenants.create("acme")).tenant_id))[1]
    async with locked(postgres_url, "api_keys"):
        async with locked(postgres_url, "table_versions"):
            database.limits_s.clear()
            waiting = asyncio.ensure_future(assert_refused(keys, token))
            await asyncio.sleep(FIRST_ANSWER_S)  # the second answer never comes
        await waiting
        first_s, second_s = database.limits_s
        assert first_s == ANSWER_LIMIT_S and second_s <= ANSWER_LIMIT_S - FIRST_ANSWER_S
    await until_authenticated(keys, token)
    await database.close()


@asynccontextmanager
async def locked(url: str, table: str) -> AsyncIterator[None]:
    """Makes readers of the table wait inside the block."""
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction():
            await connection.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
            yield
    finally:
        await connection.close()


async def until_authenticated(keys: ApiKeys, token: str) -> None:
    async def is_authenticated() -> bool:
        with suppress(Unavailable):
            await keys.authenticate(f"Bearer {token}")
            return True
        return False

    await eventually(is_authenticated)


async def assert_refused(keys: ApiKeys, token: str) -> None:
    with pytest.raises(Unavailable, match="the database does not answer"):
        await keys.authenticate(f"Bearer {token}")
