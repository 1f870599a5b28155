from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest
from sqlalchemy import insert, select, update

from tests.support.wait import eventually
from tests.unit.gateway.catalog.test_catalog import publish, version
from tests.unit.gateway.conftest import AccountingRig
from tests.unit.gateway.scripted_services import ScriptedStore, serving
from torchrelay.common.errors import Unavailable
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.control.v1 import param_store_pb2
from torchrelay.control.v1.param_store_pb2 import DeclaredFile
from torchrelay.gateway.background import background
from torchrelay.gateway.catalog.garbage_collection import (
    collect_garbage,
    drop_expired_uploads,
    free_retired_versions,
    orphaned_versions,
)
from torchrelay.gateway.catalog.model_settings import ModelSettings
from torchrelay.gateway.catalog.uploads import Upload, Uploads
from torchrelay.gateway.clients.param_store import StoreClient
from torchrelay.gateway.core import Principal
from torchrelay.gateway.sql.tables import retired_versions, uploads, versions

Client = TypeVar("Client", bound=StoreClient)


@dataclass(frozen=True)
class GarbageRig:
    """A gateway's database and catalog, and a scripted store with a client."""

    parts: AccountingRig
    store: ScriptedStore
    client: StoreClient

    @property
    def uploads(self) -> Uploads:
        return Uploads(self.parts.database, self.parts.catalog, self.client)

    async def ids(self, column: Any) -> set[str]:
        async with self.parts.database.read() as connection:
            return set((await connection.execute(select(column))).scalars())

    async def publish(self, name: str, *version_ids: str) -> None:
        """Publishes versions of a model one after the other."""
        for version_id in version_ids:
            self.store.publish(version_id)
            await publish(self.parts, name, version(version_id))

    async def delete(self, name: str) -> None:
        await self.parts.catalog.delete(await self.parts.catalog.resolve(self.principal, name))

    @property
    def principal(self) -> Principal:
        return Principal(self.parts.acme.tenant_id, "acme", "k")

    async def begin(self) -> Upload:
        upload, _ = await self.uploads.begin(
            self.parts.acme, "glossary", [DeclaredFile(path="w", num_bytes=0, sha256="0" * 64)]
        )
        return upload

    async def free(self, retired_for_s: float = 0) -> int:
        return await free_retired_versions(self.parts.database, self.client, retired_for_s)

    async def orphans(self) -> list[str]:
        orphans = await orphaned_versions(self.parts.database, self.client, older_than_s=0)
        return [orphan.version_id for orphan in orphans]

    @asynccontextmanager
    async def with_client(self, kind: type[Client]) -> AsyncIterator[GarbageRig]:
        """The rig with another client of the same store."""
        async with serving(self.store) as channel:
            yield replace(self, client=kind(channel, "store:1"))


@pytest.fixture
async def rig(parts: AccountingRig) -> AsyncIterator[GarbageRig]:
    store = ScriptedStore()  # type: ignore[abstract]
    async with serving(store) as channel:
        yield GarbageRig(parts, store, StoreClient(channel, "store:1"))


async def test_replaced_version_is_freed_after_the_delay(rig: GarbageRig) -> None:
    await rig.publish("glossary", "v1", "v2")
    rig.store.publish("v-unknown")  # to SQL: it is listed, and stays
    assert await rig.orphans() == ["v-unknown"]
    assert await rig.free(600) == 0
    async with rig.parts.database.write() as connection:
        await connection.execute(update(retired_versions).values(retired_unix_us=1))
    assert await rig.free(600) == 1
    assert (rig.store.deleted, await rig.ids(versions.c.version_id)) == (["v1"], {"v2"})
    assert await rig.free() == 0
    assert "v-unknown" in rig.store.published


async def test_version_named_again_stays(rig: GarbageRig) -> None:
    await rig.publish("glossary", "v1")
    await rig.delete("glossary")
    await publish(rig.parts, "again", version("v1"))
    assert await rig.free() == 0
    assert rig.store.deleted == []


async def test_version_of_an_unconfirmed_upload_waits_for_sql(rig: GarbageRig) -> None:
    """The upload's gateway may be about to name it; other versions are freed meanwhile."""
    await rig.publish("glossary", "v1", "v2", "v3")
    upload = await rig.begin()
    rig.store.publish("v1", upload.upload_id)
    assert await rig.free() == 1
    assert rig.store.deleted == ["v2"]
    await rig.uploads.abort(upload)
    assert await rig.free() == 1
    assert rig.store.deleted == ["v2", "v1"]


async def test_ended_unconfirmed_upload_frees_its_version(rig: GarbageRig) -> None:
    await rig.publish("glossary", "v1", "v2")
    rig.store.publish("v1", "upl-ended")  # its gateway died after its commit in SQL
    assert await rig.free() == 0
    assert rig.store.aborted == ["upl-ended"]
    assert await rig.free() == 1


async def test_version_published_again_meanwhile_stays(rig: GarbageRig) -> None:
    """Deleting takes time: what held at its start may not hold at its end."""
    await rig.publish("glossary", "v1", "v2", "v3")

    class Republishing(StoreClient):
        async def versions(self) -> Any:
            listed = await super().versions()
            await rig.publish("other", "v1")  # an upload of the same content begins and ends
            await rig.delete("other")
            return listed

    async with rig.with_client(Republishing) as other:
        assert await other.free() == 1
    assert rig.store.deleted == ["v2"]
    assert await rig.ids(versions.c.version_id) == {"v1", "v3"}


async def test_version_published_during_deletion_keeps_its_row(rig: GarbageRig) -> None:
    await rig.publish("glossary", "v1", "v2")

    class Slow(StoreClient):
        async def delete_version(self, version: Any) -> bool:
            deleted = await super().delete_version(version)
            await rig.publish("same", "v1")
            return deleted

    async with rig.with_client(Slow) as other:
        await other.free()
    assert await rig.ids(versions.c.version_id) == {"v1", "v2"}
    assert "v1" in rig.store.published


async def test_unreachable_store_is_retried(rig: GarbageRig) -> None:
    await rig.publish("glossary", "v1", "v2")
    async with open_channel("127.0.0.1:1") as channel:
        with pytest.raises(Unavailable):
            await replace(rig, client=StoreClient(channel, "store:1")).free()
    assert await rig.ids(versions.c.version_id) == {"v1", "v2"}


async def test_expired_upload_is_dropped_even_if_unknown_to_the_store(rig: GarbageRig) -> None:
    async with rig.parts.database.write() as connection:
        row = {"upload_id": "upl-1", "tenant_id": rig.parts.acme.tenant_id, "model": "m", "declared_bytes": 1}
        await connection.execute(insert(uploads).values(**row, created_unix_us=1))
    known = await rig.begin()
    assert await drop_expired_uploads(rig.uploads, lease_s=10**9 * 2) == 0
    assert await drop_expired_uploads(rig.uploads, lease_s=60) == 1
    assert await drop_expired_uploads(rig.uploads, lease_s=0) == 1
    assert rig.store.aborted == ["upl-1", known.upload_id]
    assert await drop_expired_uploads(rig.uploads, lease_s=0) == 0


async def published_without_sql(rig: GarbageRig) -> Upload:
    """An upload whose gateway was killed between the store's commit and SQL."""
    upload = await rig.begin()
    commit = param_store_pb2.CommitRequest(upload_id=upload.upload_id)
    assert [step.stage async for step in rig.store.Commit(commit, None)][-1] == "publish"
    assert await rig.ids(versions.c.version_id) == set()
    return upload


async def test_version_of_a_dead_gateway_is_freed(rig: GarbageRig) -> None:
    upload = await published_without_sql(rig)
    assert await rig.orphans() == []  # its upload is known
    assert await drop_expired_uploads(rig.uploads, lease_s=0) == 1
    assert rig.store.aborted == [upload.upload_id]
    assert await rig.ids(retired_versions.c.version_id) == {"version-one"}
    assert await rig.free() == 1
    assert (rig.store.published, await rig.ids(versions.c.version_id)) == ({}, set())


async def test_repeated_commit_adopts_a_dead_gateways_version(rig: GarbageRig) -> None:
    upload = await published_without_sql(rig)
    steps = rig.uploads.commit(upload, ModelSettings(), 0)
    assert [step.version.version_id async for step in steps if step.HasField("version")] == ["version-one"]
    assert (await rig.parts.catalog.resolve(rig.principal, "glossary")).version
    assert rig.store.claims == {}  # confirmed
    assert await rig.ids(uploads.c.upload_id) == set()


async def test_collection_continues_after_a_failed_round(rig: GarbageRig) -> None:
    await rig.publish("glossary", "v1", "v2")

    class Faulty(StoreClient):
        faults = [Unavailable("the store is away"), RuntimeError("a fault of ours")]  # noqa: RUF012

        async def versions(self) -> Any:
            if self.faults:
                raise self.faults.pop()
            return await super().versions()

    async with rig.with_client(Faulty) as other:
        database = other.parts.database
        job = collect_garbage(database, other.client, other.uploads, every_s=0.01, lease_s=1e6, retired_s=0)
        async with background(job):
            await eventually(lambda: rig.store.deleted)
    assert (Faulty.faults, rig.store.deleted, set(rig.store.published)) == ([], ["v1"], {"v2"})
