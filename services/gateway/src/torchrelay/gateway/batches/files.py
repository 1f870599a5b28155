"""Files of tenants: rows that count in the storage quota, and bytes in the param-store.

being sent --> complete --> being deleted --> deleted      what stays incomplete for a lease is deleted as well
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from sqlalchemy import ColumnElement, Select, delete, func, insert, literal, select, tuple_, update

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded
from torchrelay.common.ids import new_id
from torchrelay.gateway.batches.core import MAX_FILE_BYTES, OPEN, Purpose, StoredFile
from torchrelay.gateway.catalog.storage_quota import check_quota, locked_quota
from torchrelay.gateway.clients.param_store import StoreClient
from torchrelay.gateway.clients.rechunk import ByteStream
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.tables import batches, files

_COLUMNS = tuple(files.c[name] for name in StoredFile.__slots__)


class Files:
    """Owns the files table and makes the corresponding calls to the store."""

    def __init__(self, database: Database, store: StoreClient, max_files: int = 1000) -> None:
        """``max_files``: of a tenant."""
        self._database, self._store, self._max_files = database, store, max_files

    async def receive(self, tenant_id: str, filename: str, body: ByteStream, declared_bytes: int) -> StoredFile:
        """Stores a batch's input as it arrives. ``declared_bytes``: at least its size. Raises ``QuotaExceeded``, and
        ``InvalidRequest`` for a file that is too large or empty.
        """
        if declared_bytes > MAX_FILE_BYTES + (64 << 10):  # with its form
            raise InvalidRequest(f"a file may have at most {MAX_FILE_BYTES:,} bytes", field="file")
        file = StoredFile(new_id("file"), tenant_id, filename, Purpose.BATCH, declared_bytes, now_unix_us())
        async with self._database.write() as connection:
            quota = await locked_quota(connection, tenant_id)
            held = select(func.count()).where(files.c.tenant_id == tenant_id)
            if (await connection.execute(held)).scalar_one() >= self._max_files:
                message = f"{self._max_files} files are stored already; delete some (DELETE /v1/files/ID)"
                raise QuotaExceeded(message, field="file")
            if quota is not None:
                await check_quota(connection, tenant_id, quota, declared_bytes, field="file")
            await connection.execute(insert(files).values(_values(file) | {"is_complete": False}))
        is_stored = False
        try:
            num_bytes = await self._store.put_object(tenant_id, file.file_id, body, MAX_FILE_BYTES)
            if num_bytes == 0:
                raise InvalidRequest("the file is empty", field="file")
            of_file = update(files).where(files.c.file_id == file.file_id)
            async with self._database.write() as connection:
                stored = await connection.execute(of_file.values(num_bytes=num_bytes, is_complete=True))
            is_stored = stored.rowcount == 1  # else it was deleted with its tenant
        finally:
            if not is_stored:
                await self._drop(tenant_id, file.file_id)
        return await self.find(tenant_id, file.file_id)

    async def find(self, tenant_id: str | None, file_id: str) -> StoredFile:
        """A complete file of the tenant (None: of any). Raises ``NotFound``."""
        async with self._database.read() as connection:
            row = (await connection.execute(_of(tenant_id).where(files.c.file_id == file_id))).one_or_none()
        if row is None:
            raise NotFound(f"file {file_id[:100]!r} not found", field="file_id")
        return _file(row)

    async def page(
        self, tenant_id: str | None, purpose: Purpose | None, limit: int, after: str | None, *, newest_first: bool
    ) -> tuple[list[StoredFile], bool]:
        """At most ``limit`` files that follow ``after``, and whether there are more."""
        query, place = _of(tenant_id), (files.c.created_unix_us, files.c.file_id)
        if purpose is not None:
            query = query.where(files.c.purpose == purpose)
        if after is not None:
            last = await self.find(tenant_id, after)
            row, at = tuple_(*place), tuple_(literal(last.created_unix_us), literal(last.file_id))
            query = query.where(row < at if newest_first else row > at)
        order = [column.desc() if newest_first else column for column in place]
        async with self._database.read() as connection:
            rows = (await connection.execute(query.order_by(*order).limit(limit + 1))).all()
        return [_file(row) for row in rows[:limit]], len(rows) > limit

    def content(self, file: StoredFile) -> AsyncGenerator[bytes]:
        """The bytes, as they are read."""
        return self._store.read_object(file.tenant_id, file.file_id, file.num_bytes)

    async def delete(self, file: StoredFile) -> None:
        """Raises ``Conflict`` while a batch needs the file."""
        using = select(batches.c.batch_id).where(batches.c.input_file_id == file.file_id, batches.c.status.in_(OPEN))
        async with self._database.write() as connection:
            await locked_quota(connection, file.tenant_id)
            batch_id = (await connection.execute(using.limit(1))).scalar_one_or_none()
            if batch_id is not None:
                raise Conflict(f"batch {batch_id} still needs the file; cancel it first", field="file_id")
            of_file = update(files).where(files.c.file_id == file.file_id)
            await connection.execute(of_file.values(is_complete=False))  # no new batch begins with it
        await self._drop(file.tenant_id, file.file_id)

    async def _drop(self, tenant_id: str, file_id: str) -> None:
        await self._store.delete_object(tenant_id, file_id)  # first: bytes without a row would stay forever
        async with self._database.write() as connection:
            await connection.execute(delete(files).where(files.c.file_id == file_id))

    async def put(self, file: StoredFile, body: ByteStream) -> StoredFile:
        """Stores the bytes of a file whose row is made later; as often as called."""
        num_bytes = await self._store.put_object(file.tenant_id, file.file_id, body, 1 << 40)
        return StoredFile(file.file_id, file.tenant_id, file.filename, file.purpose, num_bytes, file.created_unix_us)

    async def drop_abandoned(self, lease_s: float) -> None:
        """Deletes files that were not complete ``lease_s`` after they were begun: their gateway died."""
        before = now_unix_us() - int(lease_s * 1e6)
        await self._drop_where(files.c.is_complete.is_(False), files.c.created_unix_us <= before)

    async def drop_all(self, tenant_id: str) -> None:
        """Deletes all files of a tenant, whatever needs them."""
        await self._drop_where(files.c.tenant_id == tenant_id)

    async def _drop_where(self, *conditions: ColumnElement[bool]) -> None:
        async with self._database.read() as connection:
            rows = (await connection.execute(select(files.c.tenant_id, files.c.file_id).where(*conditions))).all()
        for row in rows:
            await self._drop(row.tenant_id, row.file_id)


def row_of(file: StoredFile) -> dict[str, Any]:
    """The row of a complete file."""
    return _values(file) | {"is_complete": True}


def _values(file: StoredFile) -> dict[str, Any]:
    return {name: getattr(file, name) for name in StoredFile.__slots__}


def _of(tenant_id: str | None) -> Select[Any]:
    query = select(*_COLUMNS).where(files.c.is_complete.is_(True))
    return query if tenant_id is None else query.where(files.c.tenant_id == tenant_id)


def _file(row: Any) -> StoredFile:
    file_id, tenant_id, filename, purpose, num_bytes, created = row
    return StoredFile(file_id, tenant_id, filename, Purpose(purpose), num_bytes, created)
