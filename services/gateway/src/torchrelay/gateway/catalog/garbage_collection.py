"""Frees what nobody names any more: versions that were replaced or deleted a while ago, and forgotten uploads."""

from __future__ import annotations

import asyncio

from sqlalchemy import delete, exists, select

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import TorchrelayError
from torchrelay.common.process.telemetry import get_logger
from torchrelay.gateway.clients.param_store import StoreClient
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.tables import models, retired_versions, uploads, versions

log = get_logger(__name__)


async def free_retired_versions(database: Database, store: StoreClient, retired_for_s: float) -> int:
    """Deletes versions no model named for ``retired_for_s``; how many.

    Requests admitted before may still be loading one, hence the wait. While any upload is open, nothing is deleted: it
    may be about to publish the very content again. Raises ``Unavailable`` when the store or SQL is away.
    """
    before = now_unix_us() - int(retired_for_s * 1e6)
    num_freed = 0
    while (
        version_id := await _next_retired(database, before)
    ) is not None:  # asked anew each time: deleting takes time
        await store.delete_version(version_id)
        async with database.write() as connection:
            await connection.execute(delete(retired_versions).where(retired_versions.c.version_id == version_id))
            named = exists().where(models.c.version_id == versions.c.version_id)
            await connection.execute(delete(versions).where(versions.c.version_id == version_id, ~named))
        log.info("version_freed", version_id=version_id)
        num_freed += 1
    return num_freed


async def _next_retired(database: Database, before_unix_us: int) -> str | None:
    named = exists().where(models.c.version_id == retired_versions.c.version_id)
    is_uploading = exists().where(uploads.c.upload_id.is_not(None))
    query = select(retired_versions.c.version_id).where(
        retired_versions.c.retired_unix_us <= before_unix_us, ~named, ~is_uploading
    )
    async with database.read() as connection:
        version_id: str | None = (await connection.execute(query.limit(1))).scalar_one_or_none()
    return version_id


async def drop_expired_uploads(database: Database, store: StoreClient, lease_s: float) -> int:
    """Aborts uploads that were begun ``lease_s`` ago and never committed; how many."""
    before = now_unix_us() - int(lease_s * 1e6)
    async with database.read() as connection:
        query = select(uploads.c.upload_id).where(uploads.c.created_unix_us <= before)
        upload_ids = list((await connection.execute(query)).scalars())
    for upload_id in upload_ids:
        await store.abort(upload_id)
        async with database.write() as connection:
            await connection.execute(delete(uploads).where(uploads.c.upload_id == upload_id))
        log.info("upload_dropped", upload_id=upload_id)
    return len(upload_ids)


class GarbageCollector:
    """Does both, now and then; every gateway may."""

    def __init__(
        self, database: Database, store: StoreClient, *, every_s: float, lease_s: float, retired_s: float
    ) -> None:
        self._database = database
        self._store = store
        self._every_s = every_s
        self._lease_s = lease_s
        self._retired_s = retired_s

    async def run(self) -> None:
        """Until cancelled. A round that fails is logged; the next one tries again."""
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await drop_expired_uploads(self._database, self._store, self._lease_s)
                await free_retired_versions(self._database, self._store, self._retired_s)
            except TorchrelayError as error:
                log.warning("housekeeping_failed", error=error.message)
            except Exception:  # the border of the job: what one round meets must not end the gateway and its streams
                log.exception("housekeeping_crashed")
