from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import insert, select, update

from tests.unit.gateway.catalog.test_catalog import publish, version
from tests.unit.gateway.conftest import AccountingRig
from tests.unit.gateway.scripted_services import ScriptedStore, serving_store
from torchrelay.common.errors import Unavailable
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.control.v1 import param_store_pb2
from torchrelay.gateway.background import background
from torchrelay.gateway.catalog.catalog import ScalingSettings
from torchrelay.gateway.catalog.garbage_collection import (
    collect_garbage,
    drop_expired_uploads,
    free_retired_versions,
    orphaned_versions,
)
from torchrelay.gateway.catalog.uploads import Upload, Uploads
from torchrelay.gateway.clients.param_store import DeclaredFile, StoreClient
from torchrelay.gateway.core import Principal
from torchrelay.gateway.sql.tables import retired_versions, uploads, versions


@pytest.fixture
def store() -> ScriptedStore:
    return ScriptedStore()  # type: ignore[abstract]


@pytest.fixture
async def client(store: ScriptedStore) -> AsyncIterator[StoreClient]:
    async with serving_store(store) as channel:
        yield StoreClient(channel, "store:1")


async def ids_in(parts: AccountingRig, column: Any) -> set[str]:
    async with parts.database.read() as connection:
        return set((await connection.execute(select(column))).scalars())


async def stored(parts: AccountingRig, store: ScriptedStore, name: str, *version_ids: str) -> None:
    """A model whose versions these were, the last of them being its version now."""
    for version_id in version_ids:
        store.publish(version_id)
        await publish(parts, name, version(version_id))


def uploads_of(parts: AccountingRig, client: StoreClient) -> Uploads:
    return Uploads(parts.database, parts.catalog, client)


async def begun(parts: AccountingRig, client: StoreClient, model: str = "glossary") -> Upload:
    upload, _ = await uploads_of(parts, client).begin(parts.acme, model, [DeclaredFile("w", 0, "0" * 64)])
    return upload


async def test_replaced_version_is_freed_after_the_delay(
    parts: AccountingRig, store: ScriptedStore, client: StoreClient
) -> None:
    await stored(parts, store, "glossary", "v1", "v2")
    assert await free_retired_versions(parts.database, client, retired_for_s=600) == 0
    async with parts.database.write() as connection:
        await connection.execute(update(retired_versions).values(retired_unix_us=1))
    assert await free_retired_versions(parts.database, client, retired_for_s=600) == 1
    assert (store.deleted, await ids_in(parts, versions.c.version_id)) == (["v1"], {"v2"})
    assert await free_retired_versions(parts.database, client, retired_for_s=0) == 0


async def test_open_upload_does_not_block_collection(
    parts: AccountingRig, store: ScriptedStore, client: StoreClient
) -> None:
    await stored(parts, store, "glossary", "v1", "v2")
    await begun(parts, client)
    assert await free_retired_versions(parts.database, client, retired_for_s=0) == 1
    assert store.deleted == ["v1"]


async def test_version_named_again_stays(parts: AccountingRig, store: ScriptedStore, client: StoreClient) -> None:
    await stored(parts, store, "glossary", "v1")
    model = await parts.catalog.resolve(Principal(parts.acme.tenant_id, "acme", "k"), "glossary")
    await parts.catalog.delete(model)
    await publish(parts, "again", version("v1"))
    assert await free_retired_versions(parts.database, client, retired_for_s=0) == 0
    assert store.deleted == []


async def test_version_of_an_unconfirmed_upload_waits_for_sql(
    parts: AccountingRig, store: ScriptedStore, client: StoreClient
) -> None:
    """The upload's gateway may be about to name it; other versions are freed meanwhile."""
    await stored(parts, store, "glossary", "v1", "v2", "v3")
    upload = await begun(parts, client)
    store.publish("v1", upload.upload_id)
    assert await free_retired_versions(parts.database, client, retired_for_s=0) == 1
    assert store.deleted == ["v2"]
    await uploads_of(parts, client).abort(upload)
    assert await free_retired_versions(parts.database, client, retired_for_s=0) == 1
    assert store.deleted == ["v2", "v1"]


async def test_ended_unconfirmed_upload_frees_its_version(
    parts: AccountingRig, store: ScriptedStore, client: StoreClient
) -> None:
    await stored(parts, store, "glossary", "v1", "v2")
    store.publish("v1", "upl-ended")  # its gateway died after its commit in SQL
    assert await free_retired_versions(parts.database, client, retired_for_s=0) == 0
    assert store.aborted == ["upl-ended"]
    assert await free_retired_versions(parts.database, client, retired_for_s=0) == 1


async def test_version_published_again_meanwhile_stays(
    parts: AccountingRig, store: ScriptedStore, client: StoreClient
) -> None:
    """Deleting takes time: what held at its start may not hold at its end."""
    await stored(parts, store, "glossary", "v1", "v2", "v3")

    class Republishing(StoreClient):
        async def versions(self) -> Any:
            listed = await super().versions()
            await stored(parts, store, "other", "v1")  # an upload of the same content begins and ends
            await parts.catalog.delete(
                await parts.catalog.resolve(Principal(parts.acme.tenant_id, "acme", "k"), "other")
            )
            return listed

    async with serving_store(store) as channel:
        assert await free_retired_versions(parts.database, Republishing(channel, "store:1"), retired_for_s=0) == 1
    assert store.deleted == ["v2"]
    assert await ids_in(parts, versions.c.version_id) == {"v1", "v3"}


async def test_version_published_during_deletion_keeps_its_row(
    parts: AccountingRig, store: ScriptedStore, client: StoreClient
) -> None:
    await stored(parts, store, "glossary", "v1", "v2")

    class Slow(StoreClient):
        async def delete_version(self, version: Any) -> bool:
            deleted = await super().delete_version(version)
            await stored(parts, store, "same", "v1")
            return deleted

    async with serving_store(store) as channel:
        await free_retired_versions(parts.database, Slow(channel, "store:1"), retired_for_s=0)
    assert await ids_in(parts, versions.c.version_id) == {"v1", "v2"}
    assert "v1" in store.published


async def test_unreachable_store_is_retried(parts: AccountingRig) -> None:
    await publish(parts, "glossary", version("v1"))
    await publish(parts, "glossary", version("v2"))
    async with open_channel("127.0.0.1:1") as channel:
        with pytest.raises(Unavailable):
            await free_retired_versions(parts.database, StoreClient(channel, "store:1"), retired_for_s=0)
    assert await ids_in(parts, versions.c.version_id) == {"v1", "v2"}


async def test_expired_upload_is_dropped_even_if_unknown_to_the_store(
    parts: AccountingRig, store: ScriptedStore, client: StoreClient
) -> None:
    async with parts.database.write() as connection:
        row = {"upload_id": "upl-1", "tenant_id": parts.acme.tenant_id, "model": "m", "declared_bytes": 1}
        await connection.execute(insert(uploads).values(**row, created_unix_us=1))
    known = await begun(parts, client)
    open_uploads = uploads_of(parts, client)
    assert await drop_expired_uploads(open_uploads, lease_s=10**9 * 2) == 0
    assert await drop_expired_uploads(open_uploads, lease_s=60) == 1
    assert await drop_expired_uploads(open_uploads, lease_s=0) == 1
    assert store.aborted == ["upl-1", known.upload_id]
    assert await drop_expired_uploads(open_uploads, lease_s=0) == 0


async def published_without_sql(parts: AccountingRig, store: ScriptedStore, client: StoreClient) -> Upload:
    """An upload whose gateway was killed between the store's commit and SQL."""
    upload = await begun(parts, client)
    commit = param_store_pb2.CommitRequest(upload_id=upload.upload_id)
    assert [step.stage async for step in store.Commit(commit, None)][-1] == "publish"
    assert await ids_in(parts, versions.c.version_id) == set()
    return upload


async def test_version_of_a_dead_gateway_is_freed(
    parts: AccountingRig, store: ScriptedStore, client: StoreClient
) -> None:
    upload = await published_without_sql(parts, store, client)
    assert await orphaned_versions(parts.database, client, older_than_s=0) == []  # its upload is known
    assert await drop_expired_uploads(uploads_of(parts, client), lease_s=0) == 1
    assert store.aborted == [upload.upload_id]
    assert await ids_in(parts, retired_versions.c.version_id) == {"version-one"}
    assert await free_retired_versions(parts.database, client, retired_for_s=0) == 1
    assert (store.published, await ids_in(parts, versions.c.version_id)) == ({}, set())


async def test_repeated_commit_adopts_a_dead_gateways_version(
    parts: AccountingRig, store: ScriptedStore, client: StoreClient
) -> None:
    upload = await published_without_sql(parts, store, client)
    steps = uploads_of(parts, client).commit(upload, ScalingSettings(), 0)
    assert [step.version.version_id async for step in steps if step.version] == ["version-one"]
    assert (await parts.catalog.resolve(Principal(parts.acme.tenant_id, "acme", "k"), "glossary")).version
    assert store.claims == {}  # confirmed
    assert await ids_in(parts, uploads.c.upload_id) == set()


async def test_versions_unknown_to_sql_are_listed_and_kept(
    parts: AccountingRig, store: ScriptedStore, client: StoreClient
) -> None:
    await stored(parts, store, "glossary", "v1")
    store.publish("v-unknown")
    orphans = await orphaned_versions(parts.database, client, older_than_s=0)
    assert [orphan.version_id for orphan in orphans] == ["v-unknown"]
    assert await free_retired_versions(parts.database, client, retired_for_s=0) == 0
    assert "v-unknown" in store.published


async def test_collection_continues_after_a_failed_round(
    parts: AccountingRig, store: ScriptedStore, client: StoreClient
) -> None:
    await stored(parts, store, "glossary", "v1", "v2")

    class Faulty(StoreClient):
        faults = [Unavailable("the store is away"), RuntimeError("a fault of ours")]  # noqa: RUF012

        async def versions(self) -> Any:
            if self.faults:
                raise self.faults.pop()
            return await super().versions()

    async with serving_store(store) as channel:
        faulty = Faulty(channel, "store:1")
        job = collect_garbage(parts.database, faulty, uploads_of(parts, faulty), every_s=0.01, lease_s=1e6, retired_s=0)
        async with asyncio.timeout(30), background(job):
            while not store.deleted:  # noqa: ASYNC110 -- the scripted store has no event
                await asyncio.sleep(0.01)
    assert (faulty.faults, store.deleted, set(store.published)) == ([], ["v1"], {"v2"})
