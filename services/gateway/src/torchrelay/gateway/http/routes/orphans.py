"""/v1/orphans: admin only."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from torchrelay.gateway.catalog.garbage_collection import orphaned_versions
from torchrelay.gateway.http.dependencies import Admin, ServicesOf

router = APIRouter(prefix="/v1/orphans")
OlderThan = Annotated[float, Query(ge=0, le=10 * 365 * 86400)]


@router.get("")
async def orphans(services: ServicesOf, _admin: Admin, older_than_s: OlderThan = 86400.0) -> dict[str, Any]:
    """Versions in the remote store that this platform's catalog does not know."""
    unknown = await orphaned_versions(services.database, services.store, older_than_s)
    shown = [
        {"id": orphan.version_id, "object": "version", "published": orphan.published_unix_us // 1_000_000}
        for orphan in unknown
    ]
    return {"object": "list", "data": shown}


@router.delete("")
async def free(services: ServicesOf, _admin: Admin, older_than_s: OlderThan = 86400.0) -> dict[str, Any]:
    """Frees them, except those published again meanwhile. Not where several platforms share a remote store."""
    unknown = await orphaned_versions(services.database, services.store, older_than_s)
    freed = [orphan.version_id for orphan in unknown if await services.store.delete_version(orphan)]
    return {"object": "list", "deleted": freed}
