"""Ledger rows for other systems, as JSON lines, CSV or FOCUS charges.

Rows come in the order of their numbers, which is that of commits: an export that begins after the last number of the
one before has each row once. Each page is a statement over a bounded range of numbers, and nothing is held between two.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from sqlalchemy import Row, func, select

from torchrelay.gateway.billing import focus
from torchrelay.gateway.billing.csv_table import Cell, csv_bytes
from torchrelay.gateway.billing.money import exact
from torchrelay.gateway.billing.usage_query import TIME_LIMIT_S, UsageFilter
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.tables import api_keys, counters, ledger, prices, tenants

Format = Literal["jsonl", "csv", "focus"]
MEDIA_TYPES: dict[Format, str] = {"jsonl": "application/x-ndjson", "csv": "text/csv", "focus": "text/csv"}
_PAGE_ROWS = 100  # encoded at once, which delays tokens by up to 10 ms
_RANGE = 20_000  # numbers that a statement looks through
_ROWS = (
    select(
        ledger,
        tenants.c.name.label("tenant"),
        func.coalesce(func.nullif(api_keys.c.name, ""), ledger.c.key_id).label("key_name"),
        prices.c.prompt_nano,
        prices.c.cached_nano,
        prices.c.output_nano,
    )
    .join_from(ledger, tenants, ledger.c.tenant_id == tenants.c.tenant_id)
    .join(prices, ledger.c.price_id == prices.c.price_id)
    .outerjoin(api_keys, ledger.c.key_id == api_keys.c.key_id)
    .order_by(ledger.c.ledger_id)
)


async def exported_pages(
    database: Database, filter_: UsageFilter, after: int, limit: int | None
) -> AsyncGenerator[Sequence[Row[Any]], None]:
    """Up to ``limit`` rows with numbers above ``after``; pages may be empty. Rows settled meanwhile are left out."""
    conditions = UsageFilter(from_unix_us=filter_.from_unix_us, to_unix_us=filter_.to_unix_us).conditions()
    if filter_.tenant_id is not None:  # so that SQLite takes the index of the numbers, not that of tenants
        conditions.append(func.coalesce(ledger.c.tenant_id, "") == filter_.tenant_id)
    async with database.read() as connection:
        counted = await connection.execute(select(counters.c.last).where(counters.c.name == "ledger"))
        last: int = counted.scalar_one()
    while after < last and limit != 0:
        end, most = min(after + _RANGE, last), _PAGE_ROWS if limit is None else min(_PAGE_ROWS, limit)
        query = _ROWS.where(ledger.c.ledger_id > after, ledger.c.ledger_id <= end, *conditions).limit(most)
        async with database.read(TIME_LIMIT_S) as connection:
            rows = (await connection.execute(query)).all()
        yield rows
        after = rows[-1].ledger_id if len(rows) == most else end
        limit = None if limit is None else limit - len(rows)


def header(format_: Format) -> bytes:
    if format_ == "jsonl":
        return b""
    return csv_bytes([focus.COLUMNS if format_ == "focus" else tuple(_NAMES)])


def encoded(rows: Sequence[Row[Any]], format_: Format) -> bytes:
    """The lines of a page."""
    if format_ == "focus":
        return csv_bytes(charge for row in rows for charge in focus.charges_of(row))
    if format_ == "csv":
        return csv_bytes(_cells(row) for row in rows)
    lines = (dict(zip(_NAMES, _cells(row), strict=True)) for row in rows)
    return "".join(f"{json.dumps(line, default=lambda cost: format(cost, 'f'))}\n" for line in lines).encode()


_NAMES = {
    "id": "ledger_id",
    "request": "request_id",
    "choice": "choice",
    "supplement": "supplement",
    "tenant": "tenant",
    "key": "key_id",
    "model": "model",
    "version": "version_id",
    "price": "price_id",
    "prompt_tokens": "num_prompt_tokens",
    "cached_tokens": "num_cached_prompt_tokens",
    "completion_tokens": "num_output_tokens",
    "cause": "cause",
    "cost_nano": "cost_nano",
    "cost": "cost",
    "settled": "settled",
}


def _cells(row: Row[Any]) -> list[Cell]:
    settled = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=row.settled_unix_us)
    values = {**row._mapping, "cost": exact(row.cost_nano), "settled": settled.isoformat(timespec="microseconds")}
    return [values[name] for name in _NAMES.values()]
