"""Sums of usage by key, model, day or minute, and the quantities of a bill.

Whole hours come from the sums by hour; the rest of a period, and sums by minute, from the ledger.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from typing import Any, Literal

from sqlalchemy import ColumnElement, Integer, Row, Select, and_, case, cast, func, select, union_all

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.billing.bills import BilledSum
from torchrelay.gateway.billing.usage_hours import HOUR_US, SUMS, hour_of
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.tables import ledger, prices, tenants, usage_hours

TIME_LIMIT_S = 30.0  # sums over millions of rows
GroupBy = Literal["key", "model", "day", "minute"]
_UNESCAPED_OFFSET = re.compile(r"(:\d\d(?:\.\d+)?) (\d\d:?\d\d)$")
_DAY_US = 86_400_000_000
_MINUTE_US = 60_000_000
MAX_MINUTES = 2 * 24 * 60  # of sums by minute
_GROUP = ("key_id", "model", "price_id")
_TOTALS = {
    "prompt_tokens": "num_prompt_tokens",
    "cached_tokens": "num_cached_prompt_tokens",
    "completion_tokens": "num_output_tokens",
    "requests": "num_requests",
    "cost_nano": "cost_nano",
}


@dataclass(frozen=True, slots=True)
class UsageFilter:
    """Selects rows settled in [from, to) by tenant, key and model (``None``: any)."""

    tenant_id: str | None = None
    key_id: str | None = None
    model: str | None = None
    from_unix_us: int | None = None
    to_unix_us: int | None = None

    def includes(self, settled_unix_us: int) -> bool:
        """Whether the time is in the period."""
        begin, end = self.from_unix_us, self.to_unix_us
        return (begin is None or begin <= settled_unix_us) and (end is None or settled_unix_us < end)

    def conditions(
        self, row: Any = ledger.c, at: ColumnElement[int] = ledger.c.settled_unix_us
    ) -> list[ColumnElement[bool]]:
        """``row``: the columns of the ledger, or of another table with the same names; ``at``: its column of time."""
        equal = ((row.tenant_id, self.tenant_id), (row.key_id, self.key_id), (row.model, self.model))
        conditions = [column == value for column, value in equal if value is not None]
        if self.from_unix_us is not None:
            conditions.append(at >= self.from_unix_us)
        if self.to_unix_us is not None:
            conditions.append(at < self.to_unix_us)
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
    parts = [rows_of_ledger(filter_)] if group_by == "minute" else _parts(filter_)
    used = _summed(parts, lambda row: [_group(row, group_by).label("group")] if group_by else [])
    query = used.order_by("group") if group_by else used
    async with database.read(TIME_LIMIT_S) as connection:
        rows = (await connection.execute(query)).all()
    return [UsageSum(_label(row.group, group_by) if group_by else "", **_totals(row)) for row in rows]


def _group(row: Any, group_by: GroupBy) -> ColumnElement[Any]:
    columns: dict[GroupBy, ColumnElement[Any]] = {
        "key": row.key_id,
        "model": row.model,
        "day": _period(row.at_unix_us, _DAY_US),
        "minute": _period(row.at_unix_us, _MINUTE_US),
    }
    return columns[group_by]


def total_of(sums: Sequence[UsageSum]) -> UsageSum:
    """The sum over groups: a request has one key and one model, and counts at one time."""
    return UsageSum("", **{name: sum(getattr(each, name) for each in sums) for name in _TOTALS})


async def billed_sums(database: Database, filter_: UsageFilter) -> list[BilledSum]:
    """The quantities of a bill, per model and price row."""
    used = _summed(_parts(filter_), lambda row: [row.model, row.price_id]).subquery()
    columns = used.c.model, prices.c.prompt_nano, prices.c.cached_nano, prices.c.output_nano
    query = select(*(used.c[name] for name in _TOTALS), *columns)
    query = query.join_from(used, prices, used.c.price_id == prices.c.price_id)
    async with database.read(TIME_LIMIT_S) as connection:
        rows = (await connection.execute(query.order_by(used.c.model, prices.c.valid_from_unix_us))).all()
    return [BilledSum(row.model, row.prompt_nano, row.cached_nano, row.output_nano, **_totals(row)) for row in rows]


def _parts(filter_: UsageFilter) -> list[Select[Any]]:
    """The whole hours of the period, rows that are not in their sums yet, and the rows before and after these hours."""
    begin, end = filter_.from_unix_us, filter_.to_unix_us
    first = begin if begin is None else hour_of(begin + HOUR_US - 1)
    last = end if end is None else hour_of(end)
    if first is not None and last is not None and first >= last:
        return [rows_of_ledger(filter_)]
    whole = replace(filter_, from_unix_us=first, to_unix_us=last)
    parts = [rows_of_hours(whole), rows_of_ledger(whole).where(ledger.c.ledger_id.is_(None))]
    if begin != first:
        parts.append(rows_of_ledger(replace(filter_, to_unix_us=first)))
    if end != last:
        parts.append(rows_of_ledger(replace(filter_, from_unix_us=last)))
    return parts


def _summed(parts: Sequence[Select[Any]], groups: Callable[[Any], list[ColumnElement[Any]]]) -> Select[Any]:
    """Sums over the parts per group, named as in ``_TOTALS``; each part is summed first, since SQLite is slow to unite
    many rows. ``groups``: the columns of the groups, from those of a part.
    """
    sums = []
    for row in (part.subquery().c for part in parts):
        totals = (func.coalesce(func.sum(row[column]), 0).label(name) for name, column in _TOTALS.items())
        group = groups(row)
        sums.append(select(*totals, *group).group_by(*group))
    if len(sums) == 1:
        return sums[0]
    both = union_all(*sums).subquery().c
    names = [column.name for column in both if column.name not in _TOTALS]
    totals = (func.sum(both[name]).label(name) for name in _TOTALS)
    return select(*totals, *(both[name] for name in names)).group_by(*(both[name] for name in names))


def rows_of_hours(filter_: UsageFilter) -> Select[Any]:
    """Sums of hours that begin in the period."""
    row = usage_hours.c
    query = select(*(row[name] for name in _GROUP), row.hour_unix_us.label("at_unix_us"), *(row[name] for name in SUMS))
    return _where(query, filter_, row, row.hour_unix_us)


def rows_of_ledger(filter_: UsageFilter) -> Select[Any]:
    """Rows of the ledger, with the columns of ``rows_of_hours``."""
    row = ledger.c
    is_first = case((and_(row.choice == 0, row.supplement == 0), 1), else_=0).label("num_requests")
    sums = [is_first, *(row[name] for name in SUMS if name in row)]
    query = select(*(row[name] for name in _GROUP), row.settled_unix_us.label("at_unix_us"), *sums)
    return _where(query, filter_, row, row.settled_unix_us)


def _where(query: Select[Any], filter_: UsageFilter, row: Any, at: ColumnElement[int]) -> Select[Any]:
    if filter_.tenant_id is None:  # by tenant, as the indexes are
        query = query.where(row.tenant_id.in_(select(tenants.c.tenant_id)))
    return query.where(*filter_.conditions(row, at))


def _period(at: ColumnElement[int], length_us: int) -> ColumnElement[Any]:
    """The number of a row's period; the integer division works in both SQLite and PostgreSQL."""
    return cast((at - at % length_us) / length_us, Integer)


def _totals(row: Row[Any]) -> dict[str, int]:
    """The totals of a row of ``_summed``, which PostgreSQL returns as decimals."""
    return {name: int(getattr(row, name)) for name in _TOTALS}


def _label(group: Any, group_by: GroupBy) -> str:
    if group_by == "minute":
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(minutes=int(group))).isoformat()
    if group_by != "day":
        return str(group)
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=int(group))).date().isoformat()
