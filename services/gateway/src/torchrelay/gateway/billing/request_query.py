"""Requests as the ledger has them: one by its id, or a page of the newest.

All gateways write the same ledger, so each of them lists the same requests; prompts and answers are not in it. A
request is listed from its opened row on: what is refused earlier, such as a malformed body, costs nothing and is not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from sqlalchemy import ColumnElement, Row, and_, exists, or_, select

from torchrelay.common.clock import now_unix_us
from torchrelay.gateway.billing.usage_query import TIME_LIMIT_S, UsageFilter
from torchrelay.gateway.sql.database import Database, SqlConnection
from torchrelay.gateway.sql.tables import ledger, opened, tenants

Status: TypeAlias = Literal["running", "ok", "cancelled", "error", "gateway_lost"]
_FAILURES: tuple[Status, ...] = ("cancelled", "error", "gateway_lost")  # causes of the ledger, too
_MINUTE_US = 60_000_000
_GROWTH = 16  # of the period that is looked through, until it has enough requests


@dataclass(frozen=True, slots=True)
class LedgerRequest:
    """A request, with the sums over its choices."""

    request_id: str
    model: str
    key_id: str
    status: Status
    causes: tuple[str, ...]  # why each choice ended; empty while it runs
    num_prompt_tokens: int
    num_cached_prompt_tokens: int
    num_output_tokens: int
    cost_nano: int
    opened_unix_us: int
    settled_unix_us: int | None  # None while it runs


async def request_of(database: Database, request_id: str, tenant_id: str | None) -> LedgerRequest | None:
    """A request of a tenant (``None``: any); None if the tenant has no such request."""
    async with database.read() as connection:
        row = (await connection.execute(_opened(opened.c.request_id == request_id, tenant_id))).first()
        return None if row is None else (await _with_sums(connection, [row]))[0]


def as_listed(request: LedgerRequest, status: Status) -> LedgerRequest:
    """The request as it was listed with this status; it may have ended since.

    A page after a request that was listed as running begins with older requests that run, then lists all that ended.
    """
    return replace(request, settled_unix_us=None) if status == "running" else request


async def newest_requests(
    database: Database, filter_: UsageFilter, status: Status | None, limit: int, after: LedgerRequest | None = None
) -> tuple[list[LedgerRequest], bool]:
    """Up to ``limit`` requests after ``after``, and whether there are more: those that run, then by their end, the
    newest first. The filter's period is that of the end; it must have a begin, which bounds the search.

    ``after`` is the request as it was listed (``as_listed``).
    """
    rows: list[Row[Any]] = []
    async with database.read(TIME_LIMIT_S) as connection:
        if status in (None, "running") and (after is None or after.settled_unix_us is None):
            rows += await _running(connection, filter_, limit + 1, after)
        if status != "running" and len(rows) <= limit:
            running = {row.request_id for row in rows}  # may have ended since: PostgreSQL's queries see later commits
            ended = await _ended(connection, filter_, status, limit + 1, after)
            rows += [row for row in ended if row.request_id not in running]
        return await _with_sums(connection, rows[:limit]), len(rows) > limit


async def _running(
    connection: SqlConnection, filter_: UsageFilter, num: int, after: LedgerRequest | None
) -> Sequence[Row[Any]]:
    """Few rows at any time, which have an index of their own."""
    always = replace(filter_, from_unix_us=None, to_unix_us=None)
    query = select(opened).where(opened.c.settled_unix_us.is_(None), *always.conditions(opened.c))
    if after is not None:
        query = query.where(_before(opened.c.opened_unix_us, opened.c.request_id, after.opened_unix_us, after))
    query = query.order_by(opened.c.opened_unix_us.desc(), opened.c.request_id.desc()).limit(num)
    return (await connection.execute(query)).all()


async def _ended(
    connection: SqlConnection, filter_: UsageFilter, status: Status | None, num: int, after: LedgerRequest | None
) -> Sequence[Row[Any]]:
    """Looks through the last minute, then through longer periods: without a tenant the rows of a period are sorted."""
    row = ledger.c
    query = select(row.request_id).where(row.supplement == 0, *_has_ended_as(status))
    if filter_.tenant_id is None:  # by tenant, as the index is
        query = query.where(row.tenant_id.in_(select(tenants.c.tenant_id)))
    end = now_unix_us() + 1 if filter_.to_unix_us is None else filter_.to_unix_us
    if after is not None and after.settled_unix_us is not None:
        query = query.where(_before(row.settled_unix_us, row.request_id, after.settled_unix_us, after))
        end = min(end, after.settled_unix_us + 1)
    query = query.order_by(row.settled_unix_us.desc(), row.request_id.desc()).limit(num)
    first, length = filter_.from_unix_us or 0, _MINUTE_US
    while True:
        begin = max(first, end - length)
        period = replace(filter_, from_unix_us=begin, to_unix_us=end)
        names = [each.request_id for each in await connection.execute(query.where(*period.conditions()))]
        if len(names) == num or begin == first:
            break
        length *= _GROWTH
    rows = {each.request_id: each for each in await connection.execute(_opened(opened.c.request_id.in_(names)))}
    return [rows[name] for name in names]


def _before(at: ColumnElement[int], key: ColumnElement[str], at_us: int, after: LedgerRequest) -> ColumnElement[bool]:
    return or_(at < at_us, and_(at == at_us, key < after.request_id))


def _has_ended_as(status: Status | None) -> list[ColumnElement[bool]]:
    """Conditions that one row of each such request meets. A rare cause is compared before any other row is read."""
    row, other = ledger.c, ledger.alias().c
    others = exists().where(other.request_id == row.request_id, other.supplement == 0)
    if status is None:
        return [row.choice == 0]
    if status == "ok":
        return [row.choice == 0, row.cause.not_in(_FAILURES), ~others.where(other.cause.in_(_FAILURES))]
    return [row.cause == status, ~others.where(other.cause == status, other.choice < row.choice)]


def _opened(condition: ColumnElement[bool], tenant_id: str | None = None) -> Any:
    query = select(opened).where(condition)
    return query if tenant_id is None else query.where(opened.c.tenant_id == tenant_id)


async def _with_sums(connection: SqlConnection, rows: Sequence[Row[Any]]) -> list[LedgerRequest]:
    """The requests of ``rows`` of the opened table, in their order."""
    query = select(ledger).where(ledger.c.request_id.in_([row.request_id for row in rows]))
    choices: defaultdict[str, list[Row[Any]]] = defaultdict(list)
    for choice in await connection.execute(query.order_by(ledger.c.choice, ledger.c.supplement)):
        choices[choice.request_id].append(choice)
    return [_request(row, choices[row.request_id]) for row in rows]


def _request(row: Row[Any], choices: Sequence[Row[Any]]) -> LedgerRequest:
    if row.settled_unix_us is None:
        choices = ()  # what was settled since the row was read
    causes = tuple(choice.cause for choice in choices if not choice.supplement)
    return LedgerRequest(
        request_id=row.request_id,
        model=row.model,
        key_id=row.key_id,
        status=_status(causes),
        causes=causes,
        num_prompt_tokens=sum(choice.num_prompt_tokens for choice in choices) if choices else row.num_prompt_tokens,
        num_cached_prompt_tokens=sum(choice.num_cached_prompt_tokens for choice in choices),
        num_output_tokens=sum(choice.num_output_tokens for choice in choices),
        cost_nano=sum(choice.cost_nano for choice in choices),
        opened_unix_us=row.opened_unix_us,
        settled_unix_us=row.settled_unix_us,
    )


def _status(causes: Sequence[str]) -> Status:
    """Choices that have not finished by themselves share the cause of the request's end."""
    if not causes:
        return "running"
    return next((failure for failure in _FAILURES if failure in causes), "ok")
