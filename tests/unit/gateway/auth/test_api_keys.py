from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from tests.support.silent_proxy import SilentProxy
from tests.unit.gateway.conftest import PEPPER, AccountingRig
from torchrelay.common.errors import NotFound, Unauthenticated, Unavailable
from torchrelay.gateway.auth.api_keys import ApiKeys, load_pepper
from torchrelay.gateway.auth.tenants import Tenants
from torchrelay.gateway.core import ServiceClass, ServiceClassName
from torchrelay.gateway.sql.database import ANSWER_LIMIT_S, Database
from torchrelay.gateway.sql.table_versions import TableVersions


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_a_key_stands_for_its_tenant(parts: AccountingRig) -> None:
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
async def test_a_keys_class_counts_before_its_tenants(
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
async def test_anything_else_is_unauthenticated(parts: AccountingRig, header: str | None) -> None:
    with pytest.raises(Unauthenticated):
        await parts.keys.authenticate(header)


async def test_whose_key_it_was_last_is_known_without_a_question(parts: AccountingRig) -> None:
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


async def test_a_well_formed_key_of_another_install_is_refused(parts: AccountingRig) -> None:
    _, token = await parts.keys.create("acme", parts.acme.tenant_id)
    stranger = ApiKeys(parts.database, parts.table_versions, b"other pepper")
    with pytest.raises(Unauthenticated):
        await stranger.authenticate(f"Bearer {token}")


async def test_the_admin_key_is_the_setting_and_no_setting_means_no_admin(parts: AccountingRig) -> None:
    assert (await parts.keys.authenticate("Bearer tra-test")).is_admin
    without = ApiKeys(parts.database, parts.table_versions, PEPPER, admin_key="")
    with pytest.raises(Unauthenticated):
        await without.authenticate("Bearer tra-test")


async def test_revoked_here_is_refused_at_once_and_revoking_twice_is_once(parts: AccountingRig) -> None:
    info, token = await parts.keys.create("acme", parts.acme.tenant_id)
    await parts.keys.authenticate(f"Bearer {token}")
    await parts.keys.revoke(info.key_id, parts.acme.tenant_id)
    await parts.keys.revoke(info.key_id, None)
    with pytest.raises(Unauthenticated):
        await parts.keys.authenticate(f"Bearer {token}")
    assert [key.is_revoked for key in await parts.keys.list(parts.acme.tenant_id)] == [True]


async def test_another_tenants_key_cannot_be_revoked_nor_seen(parts: AccountingRig) -> None:
    other = await parts.tenants.create("other")
    info, token = await parts.keys.create("acme", parts.acme.tenant_id)
    with pytest.raises(NotFound):
        await parts.keys.revoke(info.key_id, other.tenant_id)
    assert await parts.keys.list(other.tenant_id) == []
    assert await parts.keys.authenticate(f"Bearer {token}")


async def test_another_gateway_refuses_a_revoked_key_once_its_confirmation_is_half_a_second_old(
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


async def test_a_hint_makes_it_instant(parts: AccountingRig) -> None:
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


async def test_a_cached_key_costs_no_sql_and_nothing_is_trusted_while_sql_is_away(parts: AccountingRig) -> None:
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


async def test_the_pepper_is_made_once_and_shared(database: Database) -> None:
    first = await load_pepper(database, "")
    assert len(first) == 32
    assert await load_pepper(database, "") == first
    assert await load_pepper(database, "00ff") == b"\x00\xff"


async def test_a_silent_database_costs_every_caller_the_same_three_seconds(postgres_url: str) -> None:
    async with SilentProxy(postgres_url).serving() as proxy:
        database, clock = Database(proxy.url), Clock()
        versions = TableVersions(database, confirm_s=0.5, clock=clock)
        keys, tenants = ApiKeys(database, versions, PEPPER), Tenants(database, versions)
        tenant_id = (await tenants.create("acme")).tenant_id
        tokens = [(await keys.create("acme", tenant_id))[1] for _ in range(2)]
        await keys.authenticate(f"Bearer {tokens[0]}")
        proxy.fall_silent()
        await keys.authenticate(f"Bearer {tokens[0]}")  # confirmed a moment ago
        waits_s = [await refusal_s(keys, tokens[1])]  # not cached
        clock.now += 1
        waits_s += await asyncio.gather(*(refusal_s(keys, token) for token in tokens * 10))
        await asyncio.sleep(0)
        waits_s += await asyncio.gather(*(refusal_s(keys, token) for token in tokens * 10))
        assert all(1 < wait_s < 4 for wait_s in waits_s), waits_s
        proxy.speak()
        await until_authenticated(keys, tokens[0])
        await database.close()


async def test_two_late_answers_of_a_database_cost_no_more_than_one(postgres_url: str) -> None:
    database = Database(postgres_url)
    versions = TableVersions(database, confirm_s=0.5)
    keys, tenants = ApiKeys(database, versions, PEPPER), Tenants(database, versions)
    token = (await keys.create("acme", (await tenants.create("acme")).tenant_id))[1]
    async with locked(postgres_url, "api_keys"):
        async with locked(postgres_url, "table_versions"):
            waiting = asyncio.ensure_future(refusal_s(keys, token))
            await asyncio.sleep(0.8 * ANSWER_LIMIT_S)  # so late comes the first answer; the second never does
        assert await waiting < 4
    await until_authenticated(keys, token)
    await database.close()


@asynccontextmanager
async def locked(url: str, table: str) -> AsyncIterator[None]:
    """Inside the block, who reads the table waits."""
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction():
            await connection.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
            yield
    finally:
        await connection.close()


async def until_authenticated(keys: ApiKeys, token: str) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                await keys.authenticate(f"Bearer {token}")
            except Unavailable:
                await asyncio.sleep(0.05)
            else:
                return


async def refusal_s(keys: ApiKeys, token: str) -> float:
    """Seconds until an authentication is refused for want of the database."""
    begin_s = time.monotonic()
    with pytest.raises(Unavailable, match="the database does not answer"):
        await keys.authenticate(f"Bearer {token}")
    return time.monotonic() - begin_s
