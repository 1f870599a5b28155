"""The spending that budgets count."""

from __future__ import annotations

from sqlalchemy import func, select

from torchrelay.gateway.sql.database import REPORT_LIMIT_S, Database
from torchrelay.gateway.sql.tables import adjustments, balances, usage_hours


async def spent_since(database: Database, tenant_id: str, key_id: str | None, begin_us: int) -> int:
    """The nano-dollars that a tenant, or a key of it, has spent since the begin of an hour; 0: ever.

    Adjustments count for the tenant, from the moment they were made. Never negative.
    """
    if key_id is None and begin_us == 0:
        query = select(balances.c.spent_nano).where(balances.c.tenant_id == tenant_id)
        async with database.read() as connection:
            return max(0, int((await connection.execute(query)).scalar_one()))
    hours, adjusted = usage_hours.c, 0
    used = select(func.coalesce(func.sum(hours.cost_nano), 0)).where(hours.tenant_id == tenant_id)
    used = used.where(hours.hour_unix_us >= begin_us)
    async with database.read(REPORT_LIMIT_S) as connection:
        if key_id is not None:
            used = used.where(hours.key_id == key_id)
        else:
            made = adjustments.c
            sums = select(func.coalesce(func.sum(made.amount_nano), 0)).where(made.tenant_id == tenant_id)
            adjusted = int((await connection.execute(sums.where(made.created_unix_us >= begin_us))).scalar_one())
        return max(0, int((await connection.execute(used)).scalar_one()) + adjusted)
