"""Cross-checks opened rows, ledger and balances in one read-only snapshot."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import case, func, select

from torchrelay.gateway.sql.database import REPORT_LIMIT_S, Database, SqlConnection
from torchrelay.gateway.sql.tables import balances, ledger, opened, prices

_MAX_FAULTS = 100


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """``faults`` has one sentence per inconsistency, at most a hundred."""

    num_opened: int
    num_settled: int
    num_ledger_rows: int
    cost_nano: int
    faults: tuple[str, ...]


async def reconcile(database: Database) -> Reconciliation:
    """The database reads the whole ledger, and gives no more than the faults: meant for an operator's nightly check."""
    async with database.read(REPORT_LIMIT_S) as connection:
        faults = [*await _unbalanced(connection), *await _incomplete(connection), *await _mispriced(connection)]
        num_opened = (await connection.execute(select(func.count()).select_from(opened))).scalar_one()
        settled = select(func.count()).select_from(opened).where(opened.c.settled_unix_us.is_not(None))
        num_settled = (await connection.execute(settled)).scalar_one()
        totals = select(func.count(), func.coalesce(func.sum(ledger.c.cost_nano), 0)).select_from(ledger)
        num_rows, cost = (await connection.execute(totals)).one()
    return Reconciliation(num_opened, num_settled, num_rows, int(cost), tuple(faults[:_MAX_FAULTS]))


async def _unbalanced(connection: SqlConnection) -> list[str]:
    """Tenants whose balance differs from the sum of their ledger rows."""
    total = func.coalesce(func.sum(ledger.c.cost_nano), 0)
    query = select(balances.c.tenant_id, balances.c.spent_nano, total.label("total"))
    query = query.outerjoin_from(balances, ledger, balances.c.tenant_id == ledger.c.tenant_id)
    query = (
        query.group_by(balances.c.tenant_id, balances.c.spent_nano)
        .having(balances.c.spent_nano != total)
        .limit(_MAX_FAULTS)
    )
    return [
        f"tenant {row.tenant_id}: the balance is {row.spent_nano} nano, the ledger sums to {int(row.total)}"
        for row in await connection.execute(query)
    ]


async def _incomplete(connection: SqlConnection) -> list[str]:
    """Settled requests without a row per choice, and unsettled requests with rows."""
    expected = case((opened.c.settled_unix_us.is_(None), 0), else_=opened.c.num_choices)
    num_rows = func.count(ledger.c.request_id)
    query = select(opened.c.request_id, expected.label("expected"), num_rows.label("num_rows"))
    of_settlement = (opened.c.request_id == ledger.c.request_id) & (ledger.c.supplement == 0)
    query = query.outerjoin_from(opened, ledger, of_settlement)
    query = query.group_by(opened.c.request_id, opened.c.num_choices, opened.c.settled_unix_us)
    return [
        f"request {row.request_id}: {row.expected} ledger rows expected, {row.num_rows} found"
        for row in await connection.execute(query.having(num_rows != expected).limit(_MAX_FAULTS))
    ]


async def _mispriced(connection: SqlConnection) -> list[str]:
    """Ledger rows whose cost does not follow from their price, or with more tokens than were opened."""
    fresh = ledger.c.num_prompt_tokens - ledger.c.num_cached_prompt_tokens
    cost = fresh * prices.c.prompt_nano + ledger.c.num_cached_prompt_tokens * prices.c.cached_nano
    cost += ledger.c.num_output_tokens * prices.c.output_nano  # as price_list.cost_nano
    has_more = ledger.c.num_output_tokens > opened.c.max_tokens
    has_more |= ledger.c.num_prompt_tokens > opened.c.num_prompt_tokens
    query = select(
        ledger.c.request_id, ledger.c.choice, ledger.c.cost_nano, cost.label("right"), has_more.label("more")
    )
    query = query.join_from(ledger, prices, ledger.c.price_id == prices.c.price_id)
    query = query.join(opened, ledger.c.request_id == opened.c.request_id)
    faults = []
    for row in await connection.execute(query.where((cost != ledger.c.cost_nano) | has_more).limit(_MAX_FAULTS)):
        where = f"request {row.request_id} choice {row.choice}"
        if row.right != row.cost_nano:
            faults.append(f"{where}: costs {row.right} nano, billed {row.cost_nano}")
        if row.more:
            faults.append(f"{where}: more tokens than were opened")
    return faults
