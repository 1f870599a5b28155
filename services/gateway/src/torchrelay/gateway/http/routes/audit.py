"""GET /v1/audit: the log of changes, the newest first."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query
from sqlalchemy import select

from torchrelay.common.errors import PermissionDenied
from torchrelay.gateway.http.dependencies import Caller, ServicesOf, tenant_of
from torchrelay.gateway.sql.tables import audit

router = APIRouter(prefix="/v1/audit")


@router.get("")
async def changes(
    services: ServicesOf,
    caller: Caller,
    tenant: str | None = None,
    action: str | None = None,
    target: str | None = None,
    before: Annotated[int | None, Query(ge=0, lt=2**63)] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
) -> dict[str, Any]:
    """A page of changes of the caller's tenant, or of all for an operator. ``before``: the last id of a page."""
    if not caller.may_manage_keys:
        raise PermissionDenied(
            "this key may not manage keys, and so not read the audit log: use a key that may, or the admin's"
        )
    query = select(audit).order_by(audit.c.audit_id.desc()).limit(limit + 1)
    if tenant is not None or not caller.is_admin:
        query = query.where(audit.c.tenant_id == (await tenant_of(services, caller, tenant)).tenant_id)
    if action is not None:
        query = query.where(audit.c.action == action)
    if target is not None:
        query = query.where(audit.c.target == target)
    if before is not None:
        query = query.where(audit.c.audit_id < before)
    async with services.lists.turn(caller.tenant_id), services.database.read() as connection:
        rows = (await connection.execute(query)).all()
    data = [
        {
            "id": row.audit_id,
            "object": "change",
            "at": datetime.fromtimestamp(row.at_unix_us / 1e6, UTC).isoformat(),
            "actor": row.actor,
            "action": row.action,
            "target": row.target,
            "before": None if row.before is None else json.loads(row.before),
            "after": None if row.after is None else json.loads(row.after),
        }
        for row in rows[:limit]
    ]
    return {"object": "list", "data": data, "has_more": len(rows) > limit}
