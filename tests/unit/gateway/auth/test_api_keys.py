from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.silent_proxy import SilentProxy
from tests.support.wait import eventually
from tests.unit.gateway.conftest import PEPPER, AccountingRig, Clock
from torchrelay.common.errors import Conflict, NotFound, Unauthenticated, Unavailable
from torchrelay.gateway.auth.api_keys import ApiKeys, load_pepper
from torchrelay.gateway.auth.key_format import key_id_of, mac_of, new_token
from torchrelay.gateway.auth.tenants import Tenants
from torchrelay.gateway.core import ServiceClass, ServiceClassName
from torchrelay.gateway.sql.database import ANSWER_LIMIT_S, Database
from torchrelay.gateway.sql.table_versions import TableVersions

T = TypeVar("T")


async def test_key_authenticates_its_tenant(parts: AccountingRig) -> None:
    info, token = await parts.keys.create(parts.acme.tenant_id, name="laptop", requests_per_minute=7)
    principal = await parts.keys.authenticate(f"Bearer {token}")
    assert (principal.tenant_id, principal.tenant) == (parts.acme.tenant_id, "acme")
    assert (principal.key_id, principal.limits.requests_per_minute, principal.is_admin) == (info.key_id, 7, False)
    assert await parts.keys.authenticate(f"bearer {token}") == principal


async def test_class_of_the_tenant_is_the_most_urgent_of_its_keys(parts: AccountingRig) -> None:
    classes: list[tuple[ServiceClassName | None, ServiceClassName | None, ServiceClass]] = [
        (None, None, ServiceClass.STANDARD),
        (None, "batch", ServiceClass.BATCH),
        ("interactive", "batch", ServiceClass.BATCH),
        ("standard", "interactive", ServiceClass.STANDARD),
        ("batch", None, ServiceClass.BATCH),
    ]
    for number, (of_key, of_tenant, service_class) in enumerate(classes):
        zoo = await parts.tenants.create(f"zoo-{number}", service_class=of_tenant)
        info, token = await parts.keys.create(zoo.tenant_id, service_class=of_key)
        assert (await parts.keys.authenticate(f"Bearer {token}")).service_class is service_class
        assert await parts.keys.list(zoo.tenant_id) == [info]


async def test_other_headers_and_keys_are_unauthenticated(parts: AccountingRig) -> None:
    _, token = await parts.keys.create(parts.acme.tenant_id)
    assert (await parts.keys.authenticate("Bearer tra-test")).is_admin, "by the setting"
    elsewhere = ApiKeys(parts.database, parts.table_versions, b"other pepper")
    without_admin = ApiKeys(parts.database, parts.table_versions, PEPPER, admin_key="")
    malformed = (None, "", "Bearer", "Bearer ", "Basic abc", "Bearer tra-wrong", "Bearer tr-x-y")
    for keys, header in (
        *((parts.keys, header) for header in malformed),
        (elsewhere, f"Bearer {token}"),
        (without_admin, "Bearer tra-test"),
    ):
        with pytest.raises(Unauthenticated):
            await keys.authenticate(header)


async def test_revoked_key_is_refused_at_once(parts: AccountingRig) -> None:
    info, token = await parts.keys.create(parts.acme.tenant_id)
    await parts.keys.authenticate(f"Bearer {token}")
    await parts.keys.revoke(info.key_id, parts.acme.tenant_id)
    await parts.keys.revoke(info.key_id, None)
    with pytest.raises(Unauthenticated):
        await parts.keys.authenticate(f"Bearer {token}")
    assert [key.is_revoked for key in await parts.keys.list(parts.acme.tenant_id)] == [True]


async def test_another_tenants_key_cannot_be_revoked_or_listed(parts: AccountingRig) -> None:
    other = await parts.tenants.create("other")
    info, token = await parts.keys.create(parts.acme.tenant_id)
    with pytest.raises(NotFound):
        await parts.keys.revoke(info.key_id, other.tenant_id)
    assert await parts.keys.list(other.tenant_id) == []
    assert await parts.keys.authenticate(f"Bearer {token}")


async def test_other_gateway_refuses_a_revoked_key_after_confirmation_or_a_hint(parts: AccountingRig) -> None:
    clock = Clock()
    table_versions = TableVersions(parts.database, 0.5, clock)
    elsewhere = ApiKeys(parts.database, table_versions, PEPPER)
    info, token = await parts.keys.create(parts.acme.tenant_id)
    await elsewhere.authenticate(f"Bearer {token}")
    await parts.keys.revoke(info.key_id, None)
    clock.now += 0.49  # still trusted: no hint, and confirmed less than half a second ago
    await elsewhere.authenticate(f"Bearer {token}")
    clock.now += 0.01
    with pytest.raises(Unauthenticated):
        await elsewhere.authenticate(f"Bearer {token}")

    async def hint() -> None:
        table_versions.invalidate()

    here = ApiKeys(parts.database, parts.table_versions, PEPPER, announce=hint)
    info, token = await here.create(parts.acme.tenant_id)
    await elsewhere.authenticate(f"Bearer {token}")
    await here.revoke(info.key_id, None)
    with pytest.raises(Unauthenticated):  # at once
        await elsewhere.authenticate(f"Bearer {token}")


async def test_cached_key_needs_no_sql_until_its_confirmation_is_old(parts: AccountingRig) -> None:
    clock = Clock()
    keys = ApiKeys(parts.database, TableVersions(parts.database, 0.5, clock), PEPPER)
    _, token = await keys.create(parts.acme.tenant_id)
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


class LimitedDatabase(Database):
    """Records the time limits of its answers, and waits for a tenth of them."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.limits_s: list[float] = []
        self.num_waiting = self.most_waiting = 0

    async def answer(self, query: Coroutine[Any, Any, T], time_limit_s: float = ANSWER_LIMIT_S) -> T:
        self.limits_s.append(time_limit_s)
        self.num_waiting += 1
        self.most_waiting = max(self.most_waiting, self.num_waiting)
        try:
            return await super().answer(query, time_limit_s / 10)
        finally:
            self.num_waiting -= 1


async def test_silent_database_costs_each_caller_one_time_limit(postgresql_url: str) -> None:
    async with SilentProxy(postgresql_url).serving() as proxy:
        database, clock = LimitedDatabase(proxy.url), Clock()
        versions = TableVersions(database, confirm_s=0.5, clock=clock)
        keys, tenants = ApiKeys(database, versions, PEPPER), Tenants(database, versions)
        tenant_id = (await tenants.create("acme")).tenant_id
        tokens = [(await keys.create(tenant_id))[1] for _ in range(2)]
        await until_authenticated(keys, tokens[0])
        proxy.fall_silent()
        await keys.authenticate(f"Bearer {tokens[0]}")  # confirmed a moment ago
        database.limits_s.clear()
        await assert_refused(keys, tokens[1])  # not cached
        clock.now += 1
        for _ in range(2):
            database.most_waiting = 0
            await asyncio.gather(*(assert_refused(keys, token) for token in tokens * 10))
            assert database.most_waiting == 20, "callers wait side by side"
        assert len(database.limits_s) == 1 + 20 + 20 and max(database.limits_s) <= ANSWER_LIMIT_S
        proxy.speak()
        await until_authenticated(keys, tokens[0])
        await database.close()


async def test_two_queries_share_one_time_limit(database_url: str) -> None:
    clock = Clock()

    class SlowDatabase(LimitedDatabase):
        async def answer(self, query: Coroutine[Any, Any, T], time_limit_s: float = ANSWER_LIMIT_S) -> T:
            answer = await super().answer(query, time_limit_s * 100)
            clock.now += 1.0
            return answer

    database = SlowDatabase(database_url)
    versions = TableVersions(database, confirm_s=0.5)
    keys, tenants = ApiKeys(database, versions, PEPPER, clock=clock), Tenants(database, versions)
    token = (await keys.create((await tenants.create("acme")).tenant_id))[1]
    await keys.authenticate(f"Bearer {token}")
    assert database.limits_s == [100 * ANSWER_LIMIT_S, 100 * (ANSWER_LIMIT_S - 1.0)]
    await database.close()


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


async def test_tenant_is_created_once_and_read_by_name(parts: AccountingRig) -> None:
    made = await parts.tenants.create("zoo", storage_quota_bytes=7, budget_nano=8, service_class="batch")
    assert await parts.tenants.by_name("zoo") == made
    assert [tenant.name for tenant in await parts.tenants.list()] == ["acme", "zoo"]
    with pytest.raises(Conflict):
        await parts.tenants.create("zoo")
    with pytest.raises(NotFound):
        await parts.tenants.by_name("absent")


async def test_changes_of_a_tenant_apply_to_the_next_request(parts: AccountingRig) -> None:
    _, token = await parts.keys.create(parts.acme.tenant_id)
    for budget in (None, 7, 9, None):
        assert (await parts.tenants.change("acme", {"budget_nano": budget})).limits.budget_nano == budget
        assert (await parts.keys.authenticate(f"Bearer {token}")).tenant_limits.budget_nano == budget
    expected = {"batch": ServiceClass.BATCH, "interactive": ServiceClass.INTERACTIVE, None: ServiceClass.STANDARD}
    for name, service_class in expected.items():
        assert (await parts.tenants.change("acme", {"service_class": name})).service_class == name
        assert (await parts.keys.authenticate(f"Bearer {token}")).service_class is service_class
    with pytest.raises(NotFound):
        await parts.tenants.change("absent", {"budget_nano": 1})


def test_tokens_are_unique_and_carry_their_id() -> None:
    key_id, token = new_token()
    assert token.startswith(f"tr-{key_id}-")
    assert key_id_of(token) == key_id
    assert new_token()[1] != token


@given(st.integers(min_value=0, max_value=58), st.sampled_from("0123456789abcdefghjkmnpqrstvwxyz"))
def test_mistyped_key_fails_its_checksum(place: int, other: str) -> None:
    _, token = new_token()
    place %= len(token)
    changed = token[:place] + other + token[place + 1 :]
    assert (key_id_of(changed) is None) == (changed != token)


@given(st.text(max_size=80))
def test_any_text_is_parsed_safely(text: str) -> None:
    assert key_id_of(text) is None


def test_mac_depends_on_token_and_pepper() -> None:
    macs = {mac_of(pepper, token) for pepper in (b"a", b"b") for token in ("tr-1", "tr-2")}
    assert len(macs) == 4
