from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import select

from tests.unit.gateway.conftest import PEPPER, Parts
from torchrelay.common.errors import NotFound
from torchrelay.gateway.catalogue import Catalogue, Scaling
from torchrelay.gateway.core import Principal, Shape, Version
from torchrelay.gateway.freshness import TableVersions
from torchrelay.gateway.keys import ADMIN, Keys
from torchrelay.gateway.prices import Prices
from torchrelay.gateway.sql.tables import retired_versions


def version(name: str = "v1") -> Version:
    return Version(
        version_id=name,
        pack_id=f"pack-{name}",
        pack_bytes=100,
        architecture="Qwen2ForCausalLM",
        dtype="bfloat16",
        shape=Shape(2, 1, 8, 2, 128, 64),
        routing_block_tokens=64,
        stored_bytes=110,
        eos_token_ids=(1, 2),
        file_digests={"tokenizer.json": "abc"},
    )


async def publish(parts: Parts, name: str, what: Version, scaling: Scaling = Scaling()) -> None:  # noqa: B008
    async with parts.database.write() as connection:
        await parts.catalogue.publish_in(connection, parts.acme.tenant_id, name, what, scaling)
    parts.catalogue.published()


@pytest.fixture
def caller(parts: Parts) -> Principal:
    return Principal(parts.acme.tenant_id, "acme", "key-1")


async def retired(parts: Parts) -> set[str]:
    async with parts.database.read() as connection:
        return set((await connection.execute(select(retired_versions.c.version_id))).scalars())


async def test_a_published_model_is_resolved_whole(parts: Parts, caller: Principal) -> None:
    await publish(parts, "glossary", version(), Scaling(idle_timeout_s=4))
    model = await parts.catalogue.resolve(caller, "glossary")
    assert (model.name, model.tenant_id, model.version) == ("acme/glossary", parts.acme.tenant_id, version())
    assert (model.idle_timeout_s, model.max_instances, model.price_id) == (4, 0, "price-default")
    assert await parts.catalogue.resolve(caller, "acme/glossary") is model  # from memory
    assert await parts.catalogue.models(caller) == [model] == await parts.catalogue.models(ADMIN)


@pytest.mark.parametrize(
    "name", ["", "/", "a/b/c", "acme/", "/glossary", "other/glossary", "acme/absent", "acme", "a\0b", "\ud800"]
)
async def test_anything_else_is_not_found(parts: Parts, caller: Principal, name: str) -> None:
    await publish(parts, "glossary", version())
    with pytest.raises(NotFound):
        await parts.catalogue.resolve(caller, name)


async def test_another_tenants_model_is_like_an_absent_one(parts: Parts) -> None:
    await publish(parts, "glossary", version())
    stranger = Principal((await parts.tenants.create("zoo")).tenant_id, "zoo", "key-2")
    messages = []
    for name in ("acme/glossary", "acme/absent"):
        with pytest.raises(NotFound) as raised:
            await parts.catalogue.resolve(stranger, name)
        messages.append(raised.value.message.replace(name, "NAME"))
    assert messages[0] == messages[1]
    assert await parts.catalogue.models(stranger) == []


async def test_publishing_again_replaces_the_version_and_keeps_the_settings(parts: Parts, caller: Principal) -> None:
    await publish(parts, "glossary", version("v1"), Scaling(idle_timeout_s=4, max_instances=2))
    before = await parts.catalogue.resolve(caller, "glossary")
    await publish(parts, "glossary", version("v2"), Scaling(max_instances=3))
    after = await parts.catalogue.resolve(caller, "glossary")
    assert (after.version.version_id, after.idle_timeout_s, after.max_instances) == ("v2", 4, 3)
    assert after.created_unix_us == before.created_unix_us
    assert await retired(parts) == {"v1"}
    await publish(parts, "glossary", version("v1"))
    assert await retired(parts) == {"v2"}


async def test_a_version_is_retired_when_its_last_model_goes(parts: Parts, caller: Principal) -> None:
    await publish(parts, "one", version())
    await publish(parts, "two", version())
    await parts.catalogue.delete(await parts.catalogue.resolve(caller, "one"))
    assert await retired(parts) == set()
    two = await parts.catalogue.resolve(caller, "two")
    await parts.catalogue.delete(two)
    assert await retired(parts) == {"v1"}
    with pytest.raises(NotFound):
        await parts.catalogue.delete(two)
    with pytest.raises(NotFound):
        await parts.catalogue.set_scaling(two, Scaling(max_instances=1))


async def test_deleting_retires_the_version_the_model_named_last_not_the_one_it_was_read_with(
    parts: Parts, caller: Principal
) -> None:
    await publish(parts, "glossary", version("v1"))
    read_before = await parts.catalogue.resolve(caller, "glossary")
    await publish(parts, "glossary", version("v2"))
    await parts.catalogue.delete(read_before)
    assert await retired(parts) == {"v1", "v2"}


async def test_models_of_one_version_deleted_at_once_retire_it(parts: Parts, caller: Principal) -> None:
    for name in ("one", "two"):
        await publish(parts, name, version())
    found = [await parts.catalogue.resolve(caller, name) for name in ("one", "two")]
    await asyncio.gather(*map(parts.catalogue.delete, found))
    assert await retired(parts) == {"v1"}


async def test_another_gateway_sees_a_change_once_its_confirmation_is_old(parts: Parts, caller: Principal) -> None:
    now = 0.0
    freshness = TableVersions(parts.database, 0.5, lambda: now)
    elsewhere = Catalogue(parts.database, freshness, Prices(parts.database, freshness))
    await publish(parts, "glossary", version("v1"))
    await elsewhere.resolve(caller, "glossary")
    await publish(parts, "glossary", version("v2"))
    price = await parts.prices.add("acme/glossary", 1, 2, 3)
    assert (await elsewhere.resolve(caller, "glossary")).version.version_id == "v1"
    now = 0.5
    seen = await elsewhere.resolve(caller, "glossary")
    assert (seen.version.version_id, seen.price) == ("v2", price)


async def test_a_price_that_begins_later_holds_without_any_change(
    parts: Parts, caller: Principal, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    await publish(parts, "glossary", version())
    begin_ns = time.time_ns() + 10**12
    later = await parts.prices.add("", 7, 8, 9, begin_ns // 1000)
    assert (await parts.catalogue.resolve(caller, "glossary")).price_id == "price-default"
    monkeypatch.setattr("torchrelay.gateway.prices.time.time_ns", lambda: begin_ns + 1000)
    assert (await parts.catalogue.resolve(caller, "glossary")).price == later


async def test_keys_and_catalogue_have_versions_of_their_own(parts: Parts, caller: Principal) -> None:
    keys = Keys(parts.database, parts.freshness, PEPPER)
    before = await parts.freshness.confirmed("catalogue")
    info, _ = await keys.create("acme", parts.acme.tenant_id)
    await keys.revoke(info.key_id, None)
    assert await parts.freshness.confirmed("catalogue") == before
