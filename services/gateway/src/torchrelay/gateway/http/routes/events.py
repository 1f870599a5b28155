"""/v1/events: the platform's history, for the operator."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Query

from torchrelay.gateway.billing.usage_query import instant_of
from torchrelay.gateway.http.dependencies import Admin, ServicesOf

router = APIRouter(prefix="/v1/events")
MAX_EVENTS = 1000
MAX_SEQUENCE = (1 << 63) - 1


@router.get("")
async def events(
    services: ServicesOf,
    _admin: Admin,
    since: str,
    kind: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_EVENTS)] = 200,
    after: Annotated[int | None, Query(ge=0, le=MAX_SEQUENCE)] = None,
) -> dict[str, Any]:
    """The newest events since a time, oldest first; with ``after`` those that follow this sequence number, 0 for the
    first page.
    """
    since_unix_us = max(instant_of(since, "since"), 1)
    listed = await services.scheduler.events([kind] if kind else [], since_unix_us, limit, after)
    data = [
        {
            "sequence": event.sequence,
            "at_unix_us": event.at_unix_us,
            "kind": event.kind,
            "model": event.model,
            "reason": event.reason,
            **json.loads(event.fields_json or "{}"),
        }
        for event in listed
    ]
    return {"object": "list", "data": data}
