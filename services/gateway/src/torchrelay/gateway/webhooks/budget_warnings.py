"""Warnings of budgets: an event when a key or tenant has spent 80% of its budget, and when it has spent all of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from sqlalchemy import Row, String, exists, literal, select

from torchrelay.common.clock import now_unix_us
from torchrelay.gateway.billing.spending import spent_since
from torchrelay.gateway.billing.usage_hours import HOUR_US, hour_of
from torchrelay.gateway.limits.admission import period_bounds
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.event_outbox import emit
from torchrelay.gateway.sql.tables import api_keys, budget_warnings, tenants, usage_hours

PERCENTS: Final = (80, 100)
Warned = Callable[[str, str], Awaitable[None]]  # of a tenant's name and a sentence


async def warn_of_budgets(database: Database, warned: Warned) -> None:
    """Looks at every budget; emits each warning once per period, whichever gateway sees it first.

    Raises ``Unavailable`` without SQL.
    """
    now = now_unix_us()
    for row, begin_us, spent_nano in await _spent(database, now):
        for percent in PERCENTS:
            if spent_nano * 100 < row.budget_nano * percent or spent_nano == 0:
                continue
            scope = row.key_id or row.tenant_id
            seen = {"scope": scope, "begin_unix_us": begin_us, "budget_nano": row.budget_nano, "percent": percent}
            async with database.write() as connection:
                new = database.insert(budget_warnings).values(seen).on_conflict_do_nothing()
                if not (await connection.execute(new)).rowcount:
                    continue
                data = {
                    "tenant": row.tenant,
                    "key_id": row.key_id,
                    "percent": percent,
                    "budget_nano": row.budget_nano,
                    "budget_period": row.budget_period,
                    "spent_nano": spent_nano,
                }
                await emit(connection, "budget.warning", row.tenant_id, data)
            of = f"key {row.key_id}" if row.key_id else "the tenant"
            await warned(row.tenant, f"{of} has spent {percent}% of its budget")


async def _spent(database: Database, now_us: int) -> list[tuple[Row[Any], int, int]]:
    """Each budget of a key or tenant that spends, with the begin of its period and what was spent in it."""
    spends = exists().where(usage_hours.c.hour_unix_us >= hour_of(now_us) - HOUR_US)
    of_keys = (
        select(api_keys.c.key_id, tenants.c.tenant_id, tenants.c.name.label("tenant"))
        .add_columns(api_keys.c.budget_nano, api_keys.c.budget_period)
        .join_from(api_keys, tenants)
        .where(api_keys.c.budget_nano.is_not(None), api_keys.c.revoked_unix_us.is_(None))
        .where(spends.where(usage_hours.c.tenant_id == tenants.c.tenant_id, usage_hours.c.key_id == api_keys.c.key_id))
    )
    of_tenants = (
        select(literal(None, String).label("key_id"), tenants.c.tenant_id, tenants.c.name.label("tenant"))
        .add_columns(tenants.c.budget_nano, tenants.c.budget_period)
        .where(tenants.c.budget_nano.is_not(None), tenants.c.deleted_unix_us.is_(None))
        .where(spends.where(usage_hours.c.tenant_id == tenants.c.tenant_id))
    )
    async with database.read() as connection:
        rows = [*await connection.execute(of_tenants), *await connection.execute(of_keys)]
    budgets = []
    for row in rows:
        begin_us, _ = period_bounds(row.budget_period, now_us)
        budgets.append((row, begin_us, await spent_since(database, row.tenant_id, row.key_id, begin_us)))
    return budgets
