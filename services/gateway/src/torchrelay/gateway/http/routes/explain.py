"""/v1/requests/{id}/explain and /v1/explain?model=NAME: timelines, and the platform's decisions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from sqlalchemy import select

from torchrelay.common.errors import NotFound
from torchrelay.control.v1 import scheduler_pb2
from torchrelay.gateway.core import Principal
from torchrelay.gateway.http.dependencies import Caller, Services, ServicesOf
from torchrelay.gateway.sql.tables import opened

router = APIRouter(prefix="/v1")
_PHASE = ("name", "begin_unix_us", "end_unix_us", "where", "detail")
_DECISION = ("at_unix_us", "kind", "subject", "reason")


@router.get("/requests/{request_id}/explain")
async def explain(services: ServicesOf, caller: Caller, request_id: str) -> dict[str, Any]:
    """Phases by begin, decisions by time. Tenants' requests are known once they are opened in the ledger."""
    if not caller.is_admin:
        await _check_is_own(services, caller, request_id)
    return {"id": request_id, **_shown(await services.scheduler.explain(request_id=request_id))}


@router.get("/explain")
async def explain_model(services: ServicesOf, caller: Caller, model: str) -> dict[str, Any]:
    """The last decisions about a model, by time, and what a slot is worth to it now."""
    name = (await services.catalog.resolve(caller, model)).name
    async with services.explanations.turn(caller.tenant_id):  # the scheduler decides for it what it would do now
        explanation = await services.scheduler.explain(model=name)
    worth = [{"label": line.label, "text": line.text} for line in explanation.worth]
    return {"id": name, **_shown(explanation), "worth": worth}


def _shown(explanation: scheduler_pb2.ExplainReply) -> dict[str, Any]:
    return {
        "object": "explanation",
        "phases": [{name: getattr(phase, name) for name in _PHASE} for phase in explanation.phases],
        "decisions": [{name: getattr(each, name) for name in _DECISION} for each in explanation.decisions],
    }


async def _check_is_own(services: Services, caller: Principal, request_id: str) -> None:
    is_own = (opened.c.request_id == request_id) & (opened.c.tenant_id == caller.tenant_id)
    query = select(opened.c.request_id).where(is_own)
    async with services.database.read() as connection:
        if (await connection.execute(query)).first() is None:
            raise NotFound(f"request {request_id!r} not found", field="request_id")
