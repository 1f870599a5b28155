"""Frees unused data: retired versions, uploads left open, and the leftovers of processes that died.

Open uploads do not block it. A version is deleted by these steps, whose order leaves no gap for an upload of the same
content:

    1. The store lists its versions: when each was published last, and the uploads that published it and are not
       confirmed by SQL. A version with such an upload stays.
    2. SQL lists the versions that are retired and not used by a model.
    3. The store deletes a version only if it was not published again since step 1.

An upload confirms by ``StoreClient.abort`` once its model is in SQL, so a version published before
step 1 and unused in step 2 is no longer needed, and a version published after step 1 is not deleted in step 3.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from sqlalchemy import delete, exists, select

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import Conflict
from torchrelay.common.process.telemetry import get_logger
from torchrelay.control.v1.param_store_pb2 import StoredVersion
from torchrelay.gateway.background import repeat
from torchrelay.gateway.catalog.uploads import Uploads
from torchrelay.gateway.clients.param_store import StoreClient
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.tables import models, retired_versions, uploads, versions

log = get_logger(__name__)
UNNAMED_AGE_S = 86400.0  # a pack that no version names is deleted after a day: no publication takes that long


async def free_retired_versions(database: Database, store: StoreClient, retired_for_s: float) -> int:
    """Deletes versions that no model has used for ``retired_for_s``; returns their number.

    The delay covers requests admitted earlier that may still load one. Raises ``Unavailable`` without store or SQL.
    """
    before = now_unix_us() - int(retired_for_s * 1e6)
    if not await _retired(database, before):
        return 0
    stored = {version.version_id: version for version in await store.versions()}
    num_freed = 0
    for version_id, retired_unix_us in (await _retired(database, before)).items():
        version = stored.get(version_id)
        if version is not None and version.upload_ids:
            await _confirm_ended(database, store, version.upload_ids)
        elif version is None or await store.delete_version(version):
            await _forget(database, version_id, retired_unix_us)
            log.info("version_freed", version_id=version_id)
            num_freed += 1
    return num_freed


async def _retired(database: Database, before_unix_us: int) -> dict[str, int]:
    """The versions that may be freed, with the time of their retirement, oldest first."""
    named = exists().where(models.c.version_id == retired_versions.c.version_id)
    query = select(retired_versions.c.version_id, retired_versions.c.retired_unix_us)
    query = query.where(retired_versions.c.retired_unix_us <= before_unix_us, ~named)
    async with database.read() as connection:
        rows = await connection.execute(query.order_by(retired_versions.c.retired_unix_us))
        return {row.version_id: row.retired_unix_us for row in rows}


async def _forget(database: Database, version_id: str, retired_unix_us: int) -> None:
    """Removes the rows of a freed version, unless it was published or retired again meanwhile."""
    same = (retired_versions.c.version_id == version_id, retired_versions.c.retired_unix_us == retired_unix_us)
    named = exists().where(models.c.version_id == versions.c.version_id)
    retired = exists().where(retired_versions.c.version_id == versions.c.version_id)
    async with database.write() as connection:
        await connection.execute(delete(retired_versions).where(*same))
        await connection.execute(delete(versions).where(versions.c.version_id == version_id, ~named, ~retired))


async def _confirm_ended(database: Database, store: StoreClient, upload_ids: Collection[str]) -> None:
    """Confirms uploads that published a version and are no longer in SQL: their gateway did not confirm them."""
    async with database.read() as connection:
        known = set((await connection.execute(select(uploads.c.upload_id))).scalars())
    for upload_id in set(upload_ids) - known:
        await store.abort(upload_id)


async def drop_expired_uploads(uploads_: Uploads, lease_s: float) -> int:
    """Aborts uploads begun ``lease_s`` ago and not committed; returns their number.

    If a gateway died between an upload's publication and its row in SQL, the version is retired, and freed later.
    """
    num_dropped = 0
    for upload in await uploads_.begun_before(now_unix_us() - int(lease_s * 1e6)):
        try:
            await uploads_.abort(upload)
        except Conflict:  # it is being committed: it ends by itself
            continue
        log.info("upload_dropped", upload_id=upload.upload_id)
        num_dropped += 1
    return num_dropped


async def orphaned_versions(database: Database, store: StoreClient, older_than_s: float) -> list[StoredVersion]:
    """Versions in the remote store that SQL does not know, published ``older_than_s`` ago or earlier.

    Only listed: if SQL was restored from a backup, or several platforms share a remote store, they are not garbage.
    """
    before = now_unix_us() - int(older_than_s * 1e6)
    stored = await store.versions()
    async with database.read() as connection:
        known = set((await connection.execute(select(versions.c.version_id))).scalars())
    return [
        version
        for version in stored
        if version.version_id not in known and not version.upload_ids and version.published_unix_us <= before
    ]


async def collect_garbage(
    database: Database, store: StoreClient, uploads_: Uploads, *, every_s: float, lease_s: float, retired_s: float
) -> None:
    """Collects every ``every_s`` until cancelled; any number of gateways may do so. A failed round is logged."""
    clock = asyncio.get_running_loop().time
    unnamed_due_s = clock() + every_s

    async def collect() -> None:
        nonlocal unnamed_due_s
        await drop_expired_uploads(uploads_, lease_s)
        await free_retired_versions(database, store, retired_s)
        if clock() >= unnamed_due_s:  # it lists the whole remote store
            unnamed_due_s = clock() + max(UNNAMED_AGE_S / 24, every_s)
            await store.delete_unnamed(UNNAMED_AGE_S)

    await asyncio.sleep(every_s)
    await repeat("housekeeping", collect, every_s)
