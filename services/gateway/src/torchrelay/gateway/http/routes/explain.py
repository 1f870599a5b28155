"""/v1/requests/{id}/explain: where the time of one request went, and why the platform did what it did."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from sqlalchemy import select

from torchrelay.common.errors import NotFound
from torchrelay.gateway.core import Principal
from torchrelay.gateway.http.dependencies import Caller, Services, ServicesOf
from torchrelay.gateway.sql.tables import opened

router = APIRouter(prefix="/v1/requests")


@router.get("/{request_id}/explain")
async def explain(services: ServicesOf, caller: Caller, request_id: str) -> dict[str, Any]:
    """Phases in order of begin, decisions in order of time. A request is known from its first token on."""
    await _check_is_own(services, caller, request_id)
    said = await services.scheduler.explain(request_id)
    return {
        "id": request_id,
        "object": "explanation",
        "phases": [
            {
                "name": phase.name,
                "begin_unix_us": phase.begin_unix_us,
                "end_unix_us": phase.end_unix_us,
                "where": phase.where,
                "detail": phase.detail,
            }
            for phase in said.phases
        ],
        "decisions": [
            {
                "at_unix_us": decision.at_unix_us,
                "kind": decision.kind,
                "subject": decision.subject,
                "reason": decision.reason,
            }
            for decision in said.decisions
        ],
    }


async def _check_is_own(services: Services, caller: Principal, request_id: str) -> None:
    query = select(opened.c.request_id).where(opened.c.request_id == request_id)
    if not caller.is_admin:
        query = query.where(opened.c.tenant_id == caller.tenant_id)
    async with services.database.read() as connection:
        if (await connection.execute(query)).first() is None:
            raise NotFound(f"there is no request {request_id!r}", field="request_id")
