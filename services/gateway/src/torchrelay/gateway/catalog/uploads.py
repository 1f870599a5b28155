"""Uploads of model files to the param-store, and the commit that publishes them.

The gateway tracks ownership and quota; the param-store tracks bytes, offsets and digests. An upload counts its declared
size against the tenant's storage quota as long as it is open. If a model of the same tenant was published from the same
files, they count as complete, and the commit gives that model's version a further name. If it is gone by then, the
store asks for the files as for any others.

    open --published--> gone       its row is deleted in the transaction that names the version, then the store is told
     |---refused------> gone       the store keeps its complete files for the tenant's next upload
     `---aborted------> gone       by its tenant, or at the end of its lease; a version that the store has published and
                                   SQL does not name (a gateway died in between) is retired
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Select, delete, func, insert, select, update

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import (
    Conflict,
    DataCorrupted,
    InvalidRequest,
    NotFound,
    Overloaded,
    QuotaExceeded,
    TorchrelayError,
    UploadRefused,
)
from torchrelay.common.ids import new_id
from torchrelay.common.process.telemetry import get_logger
from torchrelay.common.quantities import format_bytes
from torchrelay.control.v1 import param_store_pb2
from torchrelay.gateway.auth.tenants import Tenant
from torchrelay.gateway.catalog.catalog import BaseLost, Catalog, not_allowed
from torchrelay.gateway.catalog.model_settings import TenantSettings
from torchrelay.gateway.catalog.source import quantized, source_of
from torchrelay.gateway.catalog.storage_quota import check_quota, locked_quota
from torchrelay.gateway.clients.param_store import StoreClient, version_of
from torchrelay.gateway.core import Principal, Version
from torchrelay.gateway.sql.database import Database, SqlConnection
from torchrelay.gateway.sql.table_versions import bump_catalog_of
from torchrelay.gateway.sql.tables import tenants, uploads

log = get_logger(__name__)
Files = Sequence[param_store_pb2.FileState]
MAX_FILES = 512  # as the param-store takes them


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """Limits of each tenant; ``lease_s`` is how long an upload may stay open."""

    max_open: int = 16
    max_open_bytes: int = 1 << 40
    lease_s: float = 86400.0


@dataclass(frozen=True, slots=True)
class Upload:
    upload_id: str
    tenant_id: str
    tenant: str
    model: str  # without the tenant
    declared_bytes: int
    source: str
    created_unix_us: int

    @property
    def full_name(self) -> str:
        return f"{self.tenant}/{self.model}"


class Uploads:
    """Owns the uploads table and makes the corresponding calls to the store."""

    def __init__(
        self, database: Database, catalog: Catalog, store: StoreClient, limits: UploadLimits | None = None
    ) -> None:
        self._database = database
        self._catalog = catalog
        self._store = store
        self.limits = limits or UploadLimits()

    async def begin(
        self, tenant: Tenant, model: str, files: Sequence[param_store_pb2.DeclaredFile], quantize: str = ""
    ) -> tuple[Upload, Files]:
        """Opens an upload, whose weights become ``quantize``: "int8", or empty. Raises ``QuotaExceeded`` if the sizes
        do not fit, ``Overloaded`` if the tenant has too much open, and the store's errors.
        """
        declared_bytes = sum(file.num_bytes for file in files)
        upload_id, source = new_id("upl"), source_of(files, quantize)
        upload = Upload(upload_id, tenant.tenant_id, tenant.name, model, declared_bytes, source, now_unix_us())
        async with self._database.write() as connection:
            quota = await locked_quota(connection, tenant.tenant_id)
            if tenant.is_deleted:
                raise Conflict(f"the tenant {tenant.name} is deleted", field="model")
            await self._check_open(connection, tenant.tenant_id, declared_bytes)
            if quota is not None:
                await check_quota(connection, tenant.tenant_id, quota, declared_bytes)
            await connection.execute(
                insert(uploads).values(
                    upload_id=upload.upload_id,
                    tenant_id=tenant.tenant_id,
                    model=model,
                    declared_bytes=declared_bytes,
                    source=source,
                    created_unix_us=upload.created_unix_us,
                )
            )
        try:
            # The quota is checked here, over all of the tenant's models; the store only limits this upload's own size.
            begun = await self._store.begin(upload.upload_id, tenant.tenant_id, files, declared_bytes)
        except TorchrelayError:
            await self._forget(upload)
            raise
        return upload, await self._received(upload, begun)

    async def files(self, upload: Upload) -> Files:
        """The state of each file."""
        return await self._received(upload, (await self._store.describe(upload.upload_id)).files)

    async def _received(self, upload: Upload, files: Files) -> Files:
        if not await self._is_known(upload):
            return files
        return [
            param_store_pb2.FileState(
                path=file.path,
                num_bytes=file.num_bytes,
                num_bytes_received=file.num_bytes,
                complete=True,
                sha256=file.sha256,
            )
            for file in files
        ]

    async def _is_known(self, upload: Upload) -> bool:
        async with self._database.read() as connection:
            return await self._catalog.packed_from(connection, upload.tenant_id, upload.source) is not None

    async def _check_open(self, connection: SqlConnection, tenant_id: str, more_bytes: int) -> None:
        query = select(func.count(), func.coalesce(func.sum(uploads.c.declared_bytes), 0))
        num_open, open_bytes = (await connection.execute(query.where(uploads.c.tenant_id == tenant_id))).one()
        hint = "commit or abort one first (torchrelay uploads lists them)"
        if num_open >= self.limits.max_open:
            raise Overloaded(f"{num_open} uploads are open already; {hint}", retry_after_s=60.0)
        if num_open and int(open_bytes) + more_bytes > self.limits.max_open_bytes:
            raise Overloaded(
                f"open uploads have {format_bytes(int(open_bytes))} and this one {format_bytes(more_bytes)}; together "
                f"they may have {format_bytes(self.limits.max_open_bytes)}; {hint}",
                field="files",
                retry_after_s=60.0,
            )

    async def find(self, principal: Principal, upload_id: str) -> Upload:
        """An open upload of the principal's tenant (of any tenant for the admin). Raises ``NotFound``."""
        selected = await self._selected(_visible_to(principal).where(uploads.c.upload_id == upload_id))
        if not selected:
            raise NotFound(f"open upload {upload_id!r} not found", field="upload_id")
        if not principal.may_call(selected[0].full_name):
            raise not_allowed(principal, selected[0].full_name)
        return selected[0]

    async def list(self, principal: Principal) -> Sequence[Upload]:
        """The open uploads of the principal's tenant (of all tenants for the admin), oldest first."""
        return await self._selected(_visible_to(principal).order_by(uploads.c.created_unix_us))

    async def begun_before(self, unix_us: int) -> Sequence[Upload]:
        return await self._selected(_all_uploads().where(uploads.c.created_unix_us <= unix_us))

    async def _selected(self, query: Select[Any]) -> Sequence[Upload]:
        async with self._database.read() as connection:
            rows = await connection.execute(query)
        return [
            Upload(
                row.upload_id,
                row.tenant_id,
                row.tenant,
                row.model,
                row.declared_bytes,
                row.source,
                row.created_unix_us,
            )
            for row in rows
        ]

    async def commit(
        self,
        upload: Upload,
        settings: TenantSettings,
        largest_slot_bytes: int,
        base_version_id: str = "",
        engines: Sequence[str] = (),
        quantize: str = "",
    ) -> AsyncGenerator[param_store_pb2.CommitProgress]:
        """Validates, packs and publishes; yields each step. The model is published before the last step is yielded.

        ``base_version_id`` is that of the model that an adapter changes, ``engines`` are those that may compute the
        model; none: they are not known. ``quantize``: "int8", or empty.
        Raises ``UploadRefused`` if the model cannot be published; that ends the upload.
        """
        upload = await self._with_quantize(upload, quantize)
        if (
            not base_version_id
            and await self._is_known(upload)
            and await self._publish(upload, None, settings, engines, largest_slot_bytes)
        ):
            num_bytes = upload.declared_bytes
            yield param_store_pb2.CommitProgress(stage="publish", num_bytes_done=num_bytes, num_bytes_total=num_bytes)
            return
        version: Version | None = None
        try:
            commit = self._store.commit(upload.upload_id, largest_slot_bytes, base_version_id, engines, quantize)
            async with aclosing(commit) as steps:
                async for progress in steps:
                    if progress.HasField("version"):
                        version = version_of(progress.version)
                        await self._publish(upload, version, settings)
                    yield progress
        except UploadRefused as refused:
            await self._forget(upload)
            hint = "the upload has ended; fix the file and upload again: for an hour, unchanged files need not be sent"
            raise UploadRefused(f"{refused.message} ({hint})", field=refused.field) from None
        if version is None:
            raise DataCorrupted("the param-store ended the commit without a version")

    async def _with_quantize(self, upload: Upload, quantize: str) -> Upload:
        """The upload with the source that is committed, which may differ from the one that it began with."""
        source = quantized(upload.source, quantize)
        if source != upload.source:
            change = update(uploads).where(uploads.c.upload_id == upload.upload_id).values(source=source)
            async with self._database.write() as connection:
                await connection.execute(change)
        return replace(upload, source=source)

    async def _publish(
        self,
        upload: Upload,
        version: Version | None,
        settings: TenantSettings,
        engines: Sequence[str] = (),
        largest_slot_bytes: int = 0,
    ) -> bool:
        """Publishes the version of the upload, or (None) the one that a model of the tenant has from its source; False:
        no model has.
        """
        # Shielded: a client that disconnects now must not leave an unreferenced version behind.
        whole = self._publish_whole(upload, version, settings, engines, largest_slot_bytes)
        publishing = asyncio.ensure_future(whole)
        return await asyncio.shield(self._database.own(publishing))

    async def _publish_whole(
        self,
        upload: Upload,
        version: Version | None,
        settings: TenantSettings,
        engines: Sequence[str],
        largest_slot_bytes: int,
    ) -> bool:
        is_known = version is None
        try:
            async with self._database.write() as connection:
                quota = await locked_quota(connection, upload.tenant_id)
                is_deleted = select(tenants.c.deleted_unix_us).where(tenants.c.tenant_id == upload.tenant_id)
                if (await connection.execute(is_deleted)).scalar_one() is not None:
                    raise BaseLost(f"the tenant {upload.tenant} is deleted", field="model")
                if version is None:
                    await bump_catalog_of(connection, upload.tenant_id)  # first: see publish_in
                    version = await self._catalog.packed_from(connection, upload.tenant_id, upload.source)
                    if version is None:
                        return False
                    _check_runs(version, engines, largest_slot_bytes)
                ended = await connection.execute(delete(uploads).where(uploads.c.upload_id == upload.upload_id))
                if is_known and not ended.rowcount:  # aborted, or committed by another call; else the store refuses
                    raise NotFound(f"open upload {upload.upload_id!r} not found", field="upload_id")
                source = "" if version.base_version_id else upload.source  # an adapter also depends on its base
                await self._catalog.publish_in(connection, upload.tenant_id, upload.model, version, settings, source)
                if quota is not None:
                    await check_quota(connection, upload.tenant_id, quota, 0)
        except (QuotaExceeded, BaseLost):  # a repeated commit would publish the same version
            if version is not None:
                await self._retire(upload, version)
            raise
        finally:
            await self._confirm(upload)
        self._catalog.published()
        return True

    async def _retire(self, upload: Upload, version: Version) -> None:
        """Ends an upload whose version becomes no model's; retires the version unless another model uses it."""
        # Retired, not deleted: another tenant may be about to publish the same content (garbage_collection.py).
        async with self._database.write() as connection:
            await connection.execute(delete(uploads).where(uploads.c.upload_id == upload.upload_id))
            await self._catalog.retire_in(connection, upload.tenant_id, version)

    async def _confirm(self, upload: Upload) -> None:
        """Confirms to the store that SQL names the upload's version, or has retired it."""
        async with self._database.read() as connection:
            known = select(uploads.c.upload_id).where(uploads.c.upload_id == upload.upload_id)
            if (await connection.execute(known)).one_or_none() is not None:
                return  # SQL did not commit; the commit of the upload can be repeated
        try:
            await self._store.abort(upload.upload_id)
        except TorchrelayError as error:  # the garbage collection will
            log.warning("upload_not_confirmed", upload_id=upload.upload_id, error=error.message)

    async def abort(self, upload: Upload) -> None:
        """Deletes the upload and its received bytes. Raises ``Conflict`` while it is being committed."""
        try:
            version_id = (await self._store.describe(upload.upload_id)).version_id
        except NotFound:
            version_id = ""
        version = await self._store.version(version_id) if version_id else None
        if version is not None:
            await self._retire(upload, version)
        await self._store.abort(upload.upload_id)
        await self._forget(upload)

    async def _forget(self, upload: Upload) -> None:
        async with self._database.write() as connection:
            await connection.execute(delete(uploads).where(uploads.c.upload_id == upload.upload_id))


def _check_runs(version: Version, engines: Sequence[str], largest_slot_bytes: int) -> None:
    """Raises ``InvalidRequest`` for weights that no present worker can load, as the packer refuses them."""
    if version.needed_engine and engines and version.needed_engine not in engines:
        offered = " and ".join(engines)
        message = f"only the engine {version.needed_engine} computes these weights; this model may run with {offered}"
        raise InvalidRequest(message, field="engine")
    if 0 < largest_slot_bytes < version.pack_bytes:
        needed, held = format_bytes(version.pack_bytes), format_bytes(largest_slot_bytes)
        message = f"the weights need {needed}, and the largest slot has {held}; start a worker with more memory"
        raise InvalidRequest(message, field="files")


def _all_uploads() -> Select[Any]:
    return select(uploads, tenants.c.name.label("tenant")).join_from(uploads, tenants)


def _visible_to(principal: Principal) -> Select[Any]:
    query = _all_uploads()
    return query if principal.is_admin else query.where(uploads.c.tenant_id == principal.tenant_id)
