"""Uploads: a model's files on their way to the param-store, and the commit that publishes them.

The gateway keeps who uploads what and how much room it may take; the bytes, their offsets and their digests are the
store's. An upload holds its declared size against the tenant's storage quota from its beginning to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from sqlalchemy import delete, func, insert, select

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import Conflict, DataCorrupted, NotFound, QuotaExceeded, TorchrelayError
from torchrelay.common.ids import new_id
from torchrelay.control.v1 import param_store_pb2
from torchrelay.gateway.auth.tenants import Tenant
from torchrelay.gateway.catalog.catalog import Catalog, ScalingSettings
from torchrelay.gateway.clients.param_store import CommitProgress, DeclaredFile, StoreClient
from torchrelay.gateway.clients.rechunk import ByteStream
from torchrelay.gateway.core import Principal, Version
from torchrelay.gateway.sql.database import Database, SqlConnection
from torchrelay.gateway.sql.tables import models, tenants, uploads, versions

Files = list[param_store_pb2.FileState]
MAX_FILES = 1000


@dataclass(frozen=True, slots=True)
class Upload:
    upload_id: str
    tenant_id: str
    tenant: str
    model: str  # without the tenant

    @property
    def full_name(self) -> str:
        return f"{self.tenant}/{self.model}"


class Uploads:
    """Owns the uploads table, and the calls to the store that go with it."""

    def __init__(self, database: Database, catalog: Catalog, store: StoreClient) -> None:
        self._database = database
        self._catalog = catalog
        self._store = store

    async def begin(self, tenant: Tenant, model: str, files: Sequence[DeclaredFile]) -> tuple[Upload, Files]:
        """Opens an upload. Raises ``QuotaExceeded`` when the declared sizes do not fit, and what the store refuses."""
        declared_bytes = sum(file.num_bytes for file in files)
        upload = Upload(new_id("upl"), tenant.tenant_id, tenant.name, model)
        async with self._database.write() as connection:
            quota = await _locked_quota(connection, tenant.tenant_id)
            if quota is not None:
                await _check_quota(connection, tenant.tenant_id, quota, declared_bytes)
            await connection.execute(
                insert(uploads).values(
                    upload_id=upload.upload_id,
                    tenant_id=tenant.tenant_id,
                    model=model,
                    declared_bytes=declared_bytes,
                    created_unix_us=now_unix_us(),
                )
            )
        try:
            # The quota was judged here, over all of the tenant's models: the store bounds this upload by its own size.
            return upload, await self._store.begin(upload.upload_id, tenant.tenant_id, files, declared_bytes)
        except TorchrelayError:
            await self._forget(upload)
            raise

    async def find(self, principal: Principal, upload_id: str) -> Upload:
        """An open upload of the principal's tenant (of any for the admin). Raises ``NotFound``."""
        query = select(uploads, tenants.c.name.label("tenant")).join_from(uploads, tenants)
        query = query.where(uploads.c.upload_id == upload_id)
        if not principal.is_admin:
            query = query.where(uploads.c.tenant_id == principal.tenant_id)
        async with self._database.read() as connection:
            row = (await connection.execute(query)).one_or_none()
        if row is None:
            raise NotFound(f"there is no open upload {upload_id!r}", field="upload_id")
        return Upload(row.upload_id, row.tenant_id, row.tenant, row.model)

    async def files(self, upload: Upload) -> Files:
        return await self._store.describe(upload.upload_id)

    async def put(self, upload: Upload, path: str, offset: int, body: ByteStream) -> param_store_pb2.FileState:
        """Appends to a file at ``offset``. Raises ``Conflict`` when the store is at another offset.

        Path and offset are checked before any byte is sent: a refusal in the middle of a stream may not get through.
        """
        states = {state.path: state for state in await self._store.describe(upload.upload_id)}
        if path not in states:
            raise NotFound(f"{path} is not among the declared files", field=path)
        if (here := states[path].num_bytes_received) != offset:
            raise Conflict(f"{path} goes on at offset {here}, not at {offset}", field="Upload-Offset")
        return await self._store.put_file(upload.upload_id, path, offset, body)

    async def commit(
        self, upload: Upload, scaling: ScalingSettings, largest_slot_bytes: int
    ) -> AsyncGenerator[CommitProgress]:
        """Validates, packs and publishes; yields each step. The model is in the catalog before the last one is."""
        version: Version | None = None
        async with aclosing(self._store.commit(upload.upload_id, largest_slot_bytes)) as steps:
            async for progress in steps:
                if progress.version is not None:
                    version = progress.version
                    # Shielded: a client that leaves now must not leave a version behind that nobody names.
                    await asyncio.shield(self._publish(upload, version, scaling))
                yield progress
        if version is None:
            raise DataCorrupted("the param-store ended the commit without a version")

    async def _publish(self, upload: Upload, version: Version, scaling: ScalingSettings) -> None:
        try:
            async with self._database.write() as connection:
                quota = await _locked_quota(connection, upload.tenant_id)
                await connection.execute(delete(uploads).where(uploads.c.upload_id == upload.upload_id))
                await self._catalog.publish_in(connection, upload.tenant_id, upload.model, version, scaling)
                if quota is not None:
                    await _check_quota(connection, upload.tenant_id, quota, 0)
        except QuotaExceeded:
            await self._drop(upload, version)
            raise
        self._catalog.published()

    async def _drop(self, upload: Upload, version: Version) -> None:
        """Nothing is half-published: what the store already keeps of a refused version goes, unless others name it.

        It is retired, not deleted here: another tenant may be about to publish the same content
        (garbage_collection.py).
        """
        async with self._database.write() as connection:
            await connection.execute(delete(uploads).where(uploads.c.upload_id == upload.upload_id))
            await self._catalog.retire_in(connection, version)

    async def abort(self, upload: Upload) -> None:
        """Drops the upload and what was received of it."""
        await self._store.abort(upload.upload_id)
        await self._forget(upload)

    async def _forget(self, upload: Upload) -> None:
        async with self._database.write() as connection:
            await connection.execute(delete(uploads).where(uploads.c.upload_id == upload.upload_id))


async def _locked_quota(connection: SqlConnection, tenant_id: str) -> int | None:
    """The tenant's quota; its row is locked against other uploads, not against the ledger's references to it."""
    query = (
        select(tenants.c.storage_quota_bytes).where(tenants.c.tenant_id == tenant_id).with_for_update(key_share=True)
    )
    quota: int | None = (await connection.execute(query)).scalar_one()
    return quota


async def _check_quota(connection: SqlConnection, tenant_id: str, quota_bytes: int, more_bytes: int) -> None:
    own = select(models.c.version_id).where(models.c.tenant_id == tenant_id)
    stored = select(func.coalesce(func.sum(versions.c.stored_bytes), 0)).where(versions.c.version_id.in_(own))
    declared = select(func.coalesce(func.sum(uploads.c.declared_bytes), 0)).where(uploads.c.tenant_id == tenant_id)
    taken = int((await connection.execute(stored)).scalar_one()) + int(
        (await connection.execute(declared)).scalar_one()
    )
    if taken + more_bytes > quota_bytes:
        raise QuotaExceeded(
            f"the storage quota is {quota_bytes} bytes: {taken} are taken by models and open uploads, "
            f"and this needs {more_bytes} more; delete a model, or have the admin raise it (torchrelay tenant set)",
            field="files",
        )
