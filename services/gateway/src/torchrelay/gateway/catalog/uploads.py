"""Uploads of model files to the param-store, and the commit that publishes them.

The gateway tracks ownership and quota; the param-store tracks bytes, offsets and digests. An upload counts its declared
size against the tenant's storage quota as long as it is open.
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
    """Owns the uploads table and makes the corresponding calls to the store."""

    def __init__(self, database: Database, catalog: Catalog, store: StoreClient) -> None:
        self._database = database
        self._catalog = catalog
        self._store = store

    async def begin(self, tenant: Tenant, model: str, files: Sequence[DeclaredFile]) -> tuple[Upload, Files]:
        """Opens an upload. Raises ``QuotaExceeded`` if the declared sizes do not fit, and the store's errors."""
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
            # The quota is checked here, over all of the tenant's models; the store only limits this upload's own size.
            return upload, await self._store.begin(upload.upload_id, tenant.tenant_id, files, declared_bytes)
        except TorchrelayError:
            await self._forget(upload)
            raise

    async def find(self, principal: Principal, upload_id: str) -> Upload:
        """An open upload of the principal's tenant (of any tenant for the admin). Raises ``NotFound``."""
        query = select(uploads, tenants.c.name.label("tenant")).join_from(uploads, tenants)
        query = query.where(uploads.c.upload_id == upload_id)
        if not principal.is_admin:
            query = query.where(uploads.c.tenant_id == principal.tenant_id)
        async with self._database.read() as connection:
            row = (await connection.execute(query)).one_or_none()
        if row is None:
            raise NotFound(f"open upload {upload_id!r} not found", field="upload_id")
        return Upload(row.upload_id, row.tenant_id, row.tenant, row.model)

    async def files(self, upload: Upload) -> Files:
        return await self._store.describe(upload.upload_id)

    async def put(self, upload: Upload, path: str, offset: int, body: ByteStream) -> param_store_pb2.FileState:
        """Appends to a file at ``offset``. Raises ``Conflict`` if the store expects another offset."""
        # Checked before any byte is sent: the client may not see an error in the middle of its stream.
        states = {state.path: state for state in await self._store.describe(upload.upload_id)}
        if path not in states:
            raise NotFound(f"{path} is not a declared file", field=path)
        if (received := states[path].num_bytes_received) != offset:
            raise Conflict(f"{path} continues at offset {received}, not {offset}", field="Upload-Offset")
        return await self._store.put_file(upload.upload_id, path, offset, body)

    async def commit(
        self, upload: Upload, scaling: ScalingSettings, largest_slot_bytes: int
    ) -> AsyncGenerator[CommitProgress]:
        """Validates, packs and publishes; yields each step. The model is published before the last step is yielded."""
        version: Version | None = None
        async with aclosing(self._store.commit(upload.upload_id, largest_slot_bytes)) as steps:
            async for progress in steps:
                if progress.version is not None:
                    version = progress.version
                    # Shielded: a client that disconnects now must not leave an unreferenced version behind.
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
        """Retires a version that the store has but the quota refuses, unless a model uses it."""
        # Retired, not deleted: another tenant may be about to publish the same content (garbage_collection.py).
        async with self._database.write() as connection:
            await connection.execute(delete(uploads).where(uploads.c.upload_id == upload.upload_id))
            await self._catalog.retire_in(connection, version)

    async def abort(self, upload: Upload) -> None:
        """Deletes the upload and its received bytes."""
        await self._store.abort(upload.upload_id)
        await self._forget(upload)

    async def _forget(self, upload: Upload) -> None:
        async with self._database.write() as connection:
            await connection.execute(delete(uploads).where(uploads.c.upload_id == upload.upload_id))


async def _locked_quota(connection: SqlConnection, tenant_id: str) -> int | None:
    """The tenant's quota. Locks its row against other uploads, but not against the ledger's foreign keys."""
    query = (
        select(tenants.c.storage_quota_bytes).where(tenants.c.tenant_id == tenant_id).with_for_update(key_share=True)
    )
    quota: int | None = (await connection.execute(query)).scalar_one()
    return quota


async def _check_quota(connection: SqlConnection, tenant_id: str, quota_bytes: int, more_bytes: int) -> None:
    own = select(models.c.version_id).where(models.c.tenant_id == tenant_id)
    stored = select(func.coalesce(func.sum(versions.c.stored_bytes), 0)).where(versions.c.version_id.in_(own))
    declared = select(func.coalesce(func.sum(uploads.c.declared_bytes), 0)).where(uploads.c.tenant_id == tenant_id)
    used = sum([int((await connection.execute(query)).scalar_one()) for query in (stored, declared)])
    if used + more_bytes > quota_bytes:
        raise QuotaExceeded(
            f"storage quota of {quota_bytes} bytes exceeded: models and open uploads use {used} bytes, this needs "
            f"{more_bytes} more; delete a model or ask the admin to raise the quota (torchrelay tenant set)",
            field="files",
        )
