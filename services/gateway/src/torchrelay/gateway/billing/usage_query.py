"""Usage from the ledger: sums by key, model or day, and the quantities of a bill."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from sqlalchemy import ColumnElement, Integer, Select, cast, func, select

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.billing.bills import BilledSum
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.tables import ledger, prices

GroupBy = Literal["key", "model", "day"]
_DAY_US = 86_400_000_000
_TOTALS = ("prompt_tokens", "cached_tokens", "completion_tokens", "requests", "cost_nano")


@dataclass(frozen=True, slots=True)
class UsageFilter:
    """Selects ledger rows settled in [from, to) by tenant, key and model (``None``: any)."""

    tenant_id: str | None = None
    key_id: str | None = None
    model: str | None = None
    from_unix_us: int | None = None
    to_unix_us: int | None = None

    def conditions(self) -> list[ColumnElement[bool]]:
        row = ledger.c
        conditions: list[ColumnElement[bool]] = []
        for column, value in ((row.tenant_id, self.tenant_id), (row.key_id, self.key_id), (row.model, self.model)):
            if value is not None:
                conditions.append(column == value)
        if self.from_unix_us is not None:
            conditions.append(row.settled_unix_us >= self.from_unix_us)
        if self.to_unix_us is not None:
            conditions.append(row.settled_unix_us < self.to_unix_us)
        return conditions


@dataclass(frozen=True, slots=True)
class UsageSum:
    """Tokens, requests and cost of one group: a key id, a model, or a day (2026-11-21)."""

    group: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    requests: int
    cost_nano: int


def instant_of(text: str, field: str) -> int:
    """Unix microseconds of a date, an ISO 8601 time (UTC by default) or Unix seconds.

    Raises ``InvalidRequest`` about ``field``.
    """
    try:
        if text.isdigit() and 8 < len(text) <= 11:  # up to the year 5138
            return int(text) * 1_000_000
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        message = f"{text!r} is not a valid time; use a date (2026-11-21), an ISO 8601 time or Unix seconds"
        raise InvalidRequest(message, field=field) from error
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


async def usage_sums(database: Database, filter_: UsageFilter, group_by: GroupBy | None) -> list[UsageSum]:
    """One sum per group, in group order; without ``group_by`` a single total, even over no rows."""
    groups: dict[GroupBy, ColumnElement[Any]] = {
        "key": ledger.c.key_id,
        "model": ledger.c.model,
        # Integer division that works in both SQLite and PostgreSQL.
        "day": cast((ledger.c.settled_unix_us - ledger.c.settled_unix_us % _DAY_US) / _DAY_US, Integer),
    }
    query = select(*_sums()).where(*filter_.conditions())
    if group_by is not None:
        group = groups[group_by]
        query = query.add_columns(group.label("group")).group_by(group).order_by(group)
    async with database.read() as connection:
        rows = (await connection.execute(query)).all()
    return [
        UsageSum(
            group=_label(row.group, group_by) if group_by else "",
            **{name: int(getattr(row, name)) for name in _TOTALS},
        )
        for row in rows
    ]


async def billed_sums(database: Database, filter_: UsageFilter) -> list[BilledSum]:
    """The quantities of a bill, per model and price row."""
    query: Select[Any] = select(
        *_sums(), ledger.c.model, prices.c.prompt_nano, prices.c.cached_nano, prices.c.output_nano
    )
    query = query.join_from(ledger, prices).where(*filter_.conditions())
    query = query.group_by(ledger.c.model, ledger.c.price_id, *query.selected_columns[-3:])
    query = query.order_by(ledger.c.model, func.min(prices.c.valid_from_unix_us))
    async with database.read() as connection:
        rows = (await connection.execute(query)).all()
    return [
        BilledSum(
            model=row.model,
            prompt_nano=row.prompt_nano,
            cached_nano=row.cached_nano,
            output_nano=row.output_nano,
            **{name: int(getattr(row, name)) for name in _TOTALS},
        )
        for row in rows
    ]


def _sums() -> list[ColumnElement[Any]]:
    row = ledger.c
    return [
        func.coalesce(func.sum(row.num_prompt_tokens), 0).label("prompt_tokens"),
        func.coalesce(func.sum(row.num_cached_prompt_tokens), 0).label("cached_tokens"),
        func.coalesce(func.sum(row.num_output_tokens), 0).label("completion_tokens"),
        func.count(func.distinct(row.request_id)).label("requests"),
        func.coalesce(func.sum(row.cost_nano), 0).label("cost_nano"),
    ]


def _label(group: Any, group_by: GroupBy) -> str:
    if group_by != "day":
        return str(group)
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=int(group))).date().isoformat()
