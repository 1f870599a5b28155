"""Ledger rows for other systems, as JSON lines, CSV or FOCUS charges.

Rows come in the order of their numbers, which is that of commits: an export that begins after the last number of the
one before has each row once. Each page is a statement that reads a bounded number of rows; nothing is held between two.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeAlias

from sqlalchemy import Row, func, select

from torchrelay.gateway.billing import focus
from torchrelay.gateway.billing.csv_table import Cell, csv_bytes
from torchrelay.gateway.billing.money import exact
from torchrelay.gateway.billing.usage_query import TIME_LIMIT_S, UsageFilter
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.tables import api_keys, counters, ledger, prices, tenants

Format = Literal["jsonl", "csv", "focus"]
MEDIA_TYPES: dict[Format, str] = {"jsonl": "application/x-ndjson", "csv": "text/csv", "focus": "text/csv"}
NumberedRow: TypeAlias = tuple[int, Row[Any]]
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
    database: Database, filter_: UsageFilter, after: int, limit: int | None, *, has_own_numbers: bool
) -> AsyncGenerator[Sequence[NumberedRow], None]:
    """Up to ``limit`` rows with numbers above ``after``; pages may be empty. Rows settled meanwhile are left out.

    ``has_own_numbers``: the rows of the filter's tenant are counted from 1, which tells it nothing about others.
    """
    number, begin = ledger.c.ledger_id, after
    conditions = UsageFilter(from_unix_us=filter_.from_unix_us, to_unix_us=filter_.to_unix_us).conditions()
    if filter_.tenant_id is not None:  # by the index of the tenant's numbers; the period would need another
        conditions = [ledger.c.tenant_id == filter_.tenant_id]
    async with database.read(TIME_LIMIT_S) as connection:
        last: int = (await connection.execute(select(counters.c.last).where(counters.c.name == "ledger"))).scalar_one()
        if has_own_numbers and after:
            of_tenant = select(number).where(*conditions).order_by(number).offset(after - 1).limit(1)
            begin = (await connection.execute(of_tenant)).scalar_one_or_none() or last
    while begin < last and limit != 0:
        end = min(begin + _RANGE, last) if filter_.tenant_id is None else last
        query = _ROWS.where(number > begin, number <= end, *conditions).limit(_PAGE_ROWS)
        async with database.read(TIME_LIMIT_S) as connection:
            rows = (await connection.execute(query)).all()
        numbers = range(after + 1, after + 1 + len(rows)) if has_own_numbers else [row.ledger_id for row in rows]
        page = [each for each in zip(numbers, rows, strict=True) if filter_.includes(each[1].settled_unix_us)][:limit]
        yield page
        after += len(rows)
        begin = rows[-1].ledger_id if len(rows) == _PAGE_ROWS else end
        limit = None if limit is None else limit - len(page)


def header(format_: Format) -> bytes:
    if format_ == "jsonl":
        return b""
    return csv_bytes([focus.COLUMNS if format_ == "focus" else tuple(_NAMES)])


def encoded(page: Sequence[NumberedRow], format_: Format) -> bytes:
    """The lines of a page."""
    if format_ == "focus":
        return csv_bytes(charge for numbered in page for charge in focus.charges_of(*numbered))
    if format_ == "csv":
        return csv_bytes(_cells(*numbered) for numbered in page)
    return "".join(f"{json.dumps(usage_object(*numbered))}\n" for numbered in page).encode()


_NAMES = {
    "id": "id",
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


def usage_object(number: int, row: Row[Any]) -> dict[str, Any]:
    """A row as an object of JSON."""
    cells = dict(zip(_NAMES, _cells(number, row), strict=True))
    return {**cells, "cost": format(cells["cost"], "f")}


def _cells(number: int, row: Row[Any]) -> list[Cell]:
    settled = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=row.settled_unix_us)
    settled_text = settled.isoformat(timespec="microseconds")
    values = {**row._mapping, "id": number, "cost": exact(row.cost_nano), "settled": settled_text}
    return [values[name] for name in _NAMES.values()]
