from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import insert, select, update

from tests.unit.gateway.catalog.test_catalog import publish, version
from tests.unit.gateway.conftest import AccountingRig
from tests.unit.gateway.scripted_services import ScriptedStore, serving_store
from torchrelay.common.errors import Unavailable
from torchrelay.common.net.rpc import open_channel
from torchrelay.gateway.catalog.garbage_collection import drop_expired_uploads, free_retired_versions
from torchrelay.gateway.clients.param_store import StoreClient
from torchrelay.gateway.core import Principal
from torchrelay.gateway.sql.tables import retired_versions, uploads, versions


@pytest.fixture
def store() -> ScriptedStore:
    return ScriptedStore()  # type: ignore[abstract]


@pytest.fixture
async def client(store: ScriptedStore) -> AsyncIterator[StoreClient]:
    async with serving_store(store) as channel:
        yield StoreClient(channel, "store:1")


async def version_ids(parts: AccountingRig) -> set[str]:
    async with parts.database.read() as connection:
        return set((await connection.execute(select(versions.c.version_id))).scalars())


async def begin_upload(parts: AccountingRig) -> None:
    async with parts.database.write() as connection:
        row = {"upload_id": "upl-1", "tenant_id": parts.acme.tenant_id, "model": "m", "declared_bytes": 1}
        await connection.execute(insert(uploads).values(**row, created_unix_us=1))


async def test_a_replaced_version_is_freed_after_its_time(
    parts: AccountingRig, store: ScriptedStore, client: StoreClient
) -> None:
    await publish(parts, "glossary", version("v1"))
    await publish(parts, "glossary", version("v2"))
    assert await free_retired_versions(parts.database, client, retired_for_s=600) == 0
    async with parts.database.write() as connection:
        await connection.execute(update(retired_versions).values(retired_unix_us=1))
    assert await free_retired_versions(parts.database, client, retired_for_s=600) == 1
    assert (store.deleted, await version_ids(parts)) == (["v1"], {"v2"})
    assert await free_retired_versions(parts.database, client, retired_for_s=0) == 0


async def test_nothing_is_freed_while_an_upload_is_open_or_a_model_names_it(
    parts: AccountingRig, store: ScriptedStore, client: StoreClient
) -> None:
    await publish(parts, "glossary", version("v1"))
    model = await parts.catalog.resolve(Principal(parts.acme.tenant_id, "acme", "k"), "glossary")
    await parts.catalog.delete(model)
    await begin_upload(parts)
    assert await free_retired_versions(parts.database, client, retired_for_s=0) == 0
    await publish(parts, "again", version("v1"))
    assert await free_retired_versions(parts.database, client, retired_for_s=0) == 0
    assert store.deleted == []


async def test_what_is_named_again_meanwhile_stays(
    parts: AccountingRig, store: ScriptedStore, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleting takes time: what held at its start may not hold at its end."""
    for name in ("v1", "v2", "v3"):
        await publish(parts, "glossary", version(name))
    delete_version = client.delete_version

    async def slow(version_id: str) -> None:
        await delete_version(version_id)
        other = {"v1": "v2", "v2": "v1"}[version_id]
        await publish(parts, "other", version(other))  # not yet deleted
        await publish(parts, "same", version(version_id))  # too late, but must not fail

    monkeypatch.setattr(client, "delete_version", slow)
    assert await free_retired_versions(parts.database, client, retired_for_s=0) == 1
    assert len(store.deleted) == 1
    assert await version_ids(parts) == {"v1", "v2", "v3"}


async def test_with_the_store_away_it_is_tried_again(parts: AccountingRig) -> None:
    await publish(parts, "glossary", version("v1"))
    await publish(parts, "glossary", version("v2"))
    async with open_channel("127.0.0.1:1") as channel:
        with pytest.raises(Unavailable):
            await free_retired_versions(parts.database, StoreClient(channel, "store:1"), retired_for_s=0)
    assert await version_ids(parts) == {"v1", "v2"}


async def test_a_forgotten_upload_is_dropped_whether_or_not_the_store_knows_it(
    parts: AccountingRig, store: ScriptedStore, client: StoreClient
) -> None:
    await begin_upload(parts)
    assert await drop_expired_uploads(parts.database, client, lease_s=10**9 * 2) == 0
    assert await drop_expired_uploads(parts.database, client, lease_s=60) == 1
    assert await drop_expired_uploads(parts.database, client, lease_s=60) == 0
