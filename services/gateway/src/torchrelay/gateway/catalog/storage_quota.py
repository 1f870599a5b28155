"""The storage quota of a tenant: over its models, open uploads, files, and retired versions that are not freed yet."""

from __future__ import annotations

from sqlalchemy import func, select

from torchrelay.common.errors import QuotaExceeded
from torchrelay.gateway.sql.database import SqlConnection
from torchrelay.gateway.sql.tables import files, models, retired_versions, tenants, uploads, versions


async def locked_quota(connection: SqlConnection, tenant_id: str) -> int | None:
    """The tenant's quota. Locks its row against other uploads, but not against the ledger's foreign keys."""
    query = (
        select(tenants.c.storage_quota_bytes).where(tenants.c.tenant_id == tenant_id).with_for_update(key_share=True)
    )
    quota: int | None = (await connection.execute(query)).scalar_one()
    return quota


async def used_bytes(connection: SqlConnection, tenant_id: str) -> int:
    """The bytes that count in the tenant's quota."""
    own = select(models.c.version_id).where(models.c.tenant_id == tenant_id)
    retired = select(retired_versions.c.version_id).where(retired_versions.c.tenant_id == tenant_id)
    ids = versions.c.version_id
    stored = select(func.coalesce(func.sum(versions.c.stored_bytes), 0)).where(ids.in_(own) | ids.in_(retired))
    declared = select(func.coalesce(func.sum(uploads.c.declared_bytes), 0)).where(uploads.c.tenant_id == tenant_id)
    own_files = select(func.coalesce(func.sum(files.c.num_bytes), 0)).where(files.c.tenant_id == tenant_id)
    return sum([int((await connection.execute(query)).scalar_one()) for query in (stored, declared, own_files)])


async def check_quota(
    connection: SqlConnection, tenant_id: str, quota_bytes: int, more_bytes: int, field: str = "files"
) -> None:
    """Raises ``QuotaExceeded`` for ``field`` if the tenant uses more than its quota with ``more_bytes``."""
    used = await used_bytes(connection, tenant_id)
    if used + more_bytes > quota_bytes:
        raise QuotaExceeded(
            f"storage quota of {quota_bytes} bytes exceeded: models, open uploads, files and versions not freed yet "
            f"use {used} bytes, this needs {more_bytes} more; abort an upload, delete a file or a model (its "
            "bytes are freed some minutes later) or ask the admin to raise the quota (torchrelay tenant set)",
            field=field,
        )
