"""Frees versions replaced or deleted a while ago, and expired uploads."""

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
    """Deletes versions that no model has used for ``retired_for_s``; returns their number.

    The delay covers requests admitted earlier that may still load one. Nothing is deleted while an upload is open: it
    may be about to publish the same content. Raises ``Unavailable`` without store or SQL.
    """
    before = now_unix_us() - int(retired_for_s * 1e6)
    num_freed = 0
    # Queried again for each version: deleting takes time, and the version may be published again meanwhile.
    while (version_id := await _next_retired(database, before)) is not None:
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
    """Aborts uploads begun ``lease_s`` ago and not committed; returns their number."""
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


async def collect_garbage(
    database: Database, store: StoreClient, *, every_s: float, lease_s: float, retired_s: float
) -> None:
    """Does both every ``every_s`` until cancelled; any number of gateways may. A failed round is logged."""
    while True:
        await asyncio.sleep(every_s)
        try:
            await drop_expired_uploads(database, store, lease_s)
            await free_retired_versions(database, store, retired_s)
        except TorchrelayError as error:
            log.warning("housekeeping_failed", error=error.message)
        except Exception:  # task boundary: one failed round must not end the gateway and its streams
            log.exception("housekeeping_crashed")
