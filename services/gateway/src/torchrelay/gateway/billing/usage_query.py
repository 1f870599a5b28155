"""Usage from the ledger: sums by key, model, day or minute, and the quantities of a bill."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Literal

from sqlalchemy import ColumnElement, Integer, Row, Select, cast, func, select

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.billing.bills import BilledSum
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.tables import ledger, prices

TIME_LIMIT_S = 30.0  # sums over millions of rows
GroupBy = Literal["key", "model", "day", "minute"]
_UNESCAPED_OFFSET = re.compile(r"(:\d\d(?:\.\d+)?) (\d\d:?\d\d)$")
_DAY_US = 86_400_000_000
_MINUTE_US = 60_000_000
MAX_MINUTES = 2 * 24 * 60  # of sums by minute


@dataclass(frozen=True, slots=True)
class UsageFilter:
    """Selects ledger rows settled in [from, to) by tenant, key and model (``None``: any)."""

    tenant_id: str | None = None
    key_id: str | None = None
    model: str | None = None
    from_unix_us: int | None = None
    to_unix_us: int | None = None

    def conditions(self, row: Any = ledger.c) -> list[ColumnElement[bool]]:
        """``row``: the columns of the ledger, or of another table with the same names."""
        equal = ((row.tenant_id, self.tenant_id), (row.key_id, self.key_id), (row.model, self.model))
        conditions = [column == value for column, value in equal if value is not None]
        if self.from_unix_us is not None:
            conditions.append(row.settled_unix_us >= self.from_unix_us)
        if self.to_unix_us is not None:
            conditions.append(row.settled_unix_us < self.to_unix_us)
        return conditions


@dataclass(frozen=True, slots=True)
class UsageSum:
    """Tokens, requests and cost of one group: a key id, a model, a day (2026-11-21) or a minute."""

    group: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    requests: int
    cost_nano: int


def instant_of(text: str, field: str) -> int:
    """Unix microseconds of a date, an ISO 8601 time (UTC by default) or Unix seconds.

    A space before the offset of a time zone is a `+` that was not escaped in a query. Raises ``InvalidRequest`` about
    ``field``.
    """
    try:
        if text.isdigit() and 8 < len(text) <= 11:  # up to the year 5138
            return int(text) * 1_000_000
        moment = datetime.fromisoformat(_UNESCAPED_OFFSET.sub(r"\1+\2", text))
    except ValueError as error:
        message = f"{text!r} is not a valid time; use a date (2026-11-21), an ISO 8601 time or Unix seconds"
        raise InvalidRequest(message, field=field) from error
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def end_of(text: str, field: str) -> int:
    """``instant_of`` the end of a period: a date includes its day."""
    instant = instant_of(text, field)
    try:
        date.fromisoformat(text)
    except ValueError:
        return instant
    return instant + _DAY_US


async def usage_sums(database: Database, filter_: UsageFilter, group_by: GroupBy | None) -> list[UsageSum]:
    """Sums per group, in group order; without ``group_by`` a single total, even over no rows.

    Raises ``InvalidRequest`` for sums by minute from more than ``MAX_MINUTES`` ago.
    """
    if group_by == "minute" and (filter_.from_unix_us or 0) < now_unix_us() - MAX_MINUTES * _MINUTE_US:
        raise InvalidRequest(f"sums by minute need a time of the last {MAX_MINUTES // 60} hours", field="from")
    groups: dict[GroupBy, ColumnElement[Any]] = {
        "key": ledger.c.key_id,
        "model": ledger.c.model,
        "day": _period(_DAY_US),
        "minute": _period(_MINUTE_US),
    }
    query = select(*_sums()).where(*filter_.conditions())
    if group_by is not None:
        group = groups[group_by]
        query = query.add_columns(group.label("group")).group_by(group).order_by(group)
    async with database.read(TIME_LIMIT_S) as connection:
        rows = (await connection.execute(query)).all()
    return [UsageSum(_label(row.group, group_by) if group_by else "", **_totals(row)) for row in rows]


async def billed_sums(database: Database, filter_: UsageFilter) -> list[BilledSum]:
    """The quantities of a bill, per model and price row."""
    query: Select[Any] = select(
        *_sums(), ledger.c.model, prices.c.prompt_nano, prices.c.cached_nano, prices.c.output_nano
    )
    query = query.join_from(ledger, prices).where(*filter_.conditions())
    query = query.group_by(ledger.c.model, ledger.c.price_id, *query.selected_columns[-3:])
    query = query.order_by(ledger.c.model, func.min(prices.c.valid_from_unix_us))
    async with database.read(TIME_LIMIT_S) as connection:
        rows = (await connection.execute(query)).all()
    return [BilledSum(row.model, row.prompt_nano, row.cached_nano, row.output_nano, **_totals(row)) for row in rows]


def _period(length_us: int) -> ColumnElement[Any]:
    """The number of a row's period; the integer division works in both SQLite and PostgreSQL."""
    return cast((ledger.c.settled_unix_us - ledger.c.settled_unix_us % length_us) / length_us, Integer)


def _sums() -> list[ColumnElement[Any]]:
    summed = {
        "prompt_tokens": ledger.c.num_prompt_tokens,
        "cached_tokens": ledger.c.num_cached_prompt_tokens,
        "completion_tokens": ledger.c.num_output_tokens,
        "cost_nano": ledger.c.cost_nano,
    }
    sums = [func.coalesce(func.sum(column), 0).label(name) for name, column in summed.items()]
    return [*sums, func.count(func.distinct(ledger.c.request_id)).label("requests")]


def _totals(row: Row[Any]) -> dict[str, int]:
    """The totals of a row of ``_sums``, which PostgreSQL returns as decimals."""
    names = ("prompt_tokens", "cached_tokens", "completion_tokens", "requests", "cost_nano")
    return {name: int(getattr(row, name)) for name in names}


def _label(group: Any, group_by: GroupBy) -> str:
    if group_by == "minute":
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(minutes=int(group))).isoformat()
    if group_by != "day":
        return str(group)
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=int(group))).date().isoformat()
