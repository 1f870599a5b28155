"""Events that wait for webhooks, written in the transactions of what they tell."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias, get_args

from sqlalchemy import insert, update

from torchrelay.common.clock import now_unix_us
from torchrelay.gateway.sql.database import SqlConnection
from torchrelay.gateway.sql.tables import counters, webhook_events

EventType: TypeAlias = Literal["usage", "budget.warning", "invoice.closed"]
EVENT_TYPES: Final[tuple[EventType, ...]] = get_args(EventType)


async def emit(connection: SqlConnection, type_: EventType, tenant_id: str, data: Mapping[str, Any]) -> None:
    """Adds an event within the caller's transaction; numbered in the order of commits."""
    rise = update(counters).where(counters.c.name == "webhook_events").values(last=counters.c.last + 1)
    number = (await connection.execute(rise.returning(counters.c.last))).scalar_one()
    row = {"event_id": number, "type": type_, "tenant_id": tenant_id, "data": json.dumps(data)}
    await connection.execute(insert(webhook_events).values({**row, "at_unix_us": now_unix_us()}))
