"""Cross-checks opened rows, ledger, usage registers, sums by hour, balances, adjustments and invoices.

Each statement reads a bounded range of rows, and compares what was written in the same transactions. So its time and
memory are bounded however large the ledger is, and the gateways go on writing meanwhile.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Executable, Row, case, func, literal, or_, select, union_all

from torchrelay.common.errors import Unavailable
from torchrelay.gateway.billing.invoices import Invoices
from torchrelay.gateway.billing.ledger import opened_of
from torchrelay.gateway.billing.orphan_sweep import RegisterSource
from torchrelay.gateway.billing.usage_hours import HOUR_US, SUMS, hour_of
from torchrelay.gateway.billing.usage_query import UsageFilter, rows_of_hours, rows_of_ledger
from torchrelay.gateway.billing.usage_register import usages_from_registers
from torchrelay.gateway.core import FinishCause
from torchrelay.gateway.sql.database import REPORT_LIMIT_S, Database
from torchrelay.gateway.sql.tables import (
    adjustments,
    balances,
    counters,
    invoices,
    ledger,
    opened,
    prices,
    tenants,
    usage_hours,
)

_MAX_FAULTS = 100
_RANGE_ROWS = 50_000
_RANGE_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """``faults`` has one sentence per inconsistency, at most a hundred."""

    num_opened: int
    num_settled: int
    num_ledger_rows: int
    cost_nano: int  # of the ledger
    adjusted_nano: int
    num_in_registers: int | None  # swept requests whose registers still exist; None: NATS is away
    difference_nano: int  # of balances to sums by hour and adjustments, and of these sums to the ledger, without signs
    faults: tuple[str, ...]


async def reconcile(database: Database, registers: RegisterSource | None = None) -> Reconciliation:
    """The database reads the whole ledger, and gives no more than sums and faults: meant for an operator's nightly
    check. ``registers``: None while NATS is away.
    """
    check = _Check(database)
    await check.numbers()
    await check.requests()
    num_in_registers = None if registers is None else await check.registers(registers)
    for tenant in await check.rows(select(tenants.c.tenant_id)):
        await check.hours(tenant.tenant_id)
        await check.balance(tenant.tenant_id)
    for row in await check.rows(select(invoices)):
        due = (await Invoices(database).invoice(row.tenant_id, row.period)).amount_nano
        if due != row.total_nano:
            check.faults.append(f"invoice {row.number}: closed at {row.total_nano} nano, its lines sum to {due}")
    return Reconciliation(
        check.num_opened,
        check.num_settled,
        check.num_rows,
        check.cost_nano,
        check.adjusted_nano,
        num_in_registers,
        check.difference_nano,
        tuple(check.faults[:_MAX_FAULTS]),
    )


class _Check:
    """The sums and faults so far."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.faults: list[str] = []
        self.num_opened = self.num_settled = self.num_rows = 0
        self.cost_nano = self.adjusted_nano = self.difference_nano = 0

    async def rows(self, query: Executable) -> Sequence[Row[Any]]:
        async with self._database.read(REPORT_LIMIT_S) as connection:
            return (await connection.execute(query)).all()

    async def numbers(self) -> None:
        """Ledger rows are numbered without gaps, up to the counter."""
        number, cost = ledger.c.ledger_id, func.coalesce(func.sum(ledger.c.cost_nano), 0).label("cost")
        counter = select(counters.c.last).where(counters.c.name == "ledger")
        (counted,) = await self.rows(counter)
        for begin in range(0, counted.last, _RANGE_ROWS):
            end = min(begin + _RANGE_ROWS, counted.last)
            (range_,) = await self.rows(select(func.count().label("num"), cost).where(number > begin, number <= end))
            self.num_rows += range_.num
            self.cost_nano += int(range_.cost)
            if range_.num != end - begin:
                self.faults.append(f"ledger ids {begin + 1} to {end}: {range_.num} rows found")
        beyond = select(func.count()).where(or_(number.is_(None), number > counter.scalar_subquery()))
        ((num_beyond,),) = await self.rows(beyond)
        if num_beyond:
            self.faults.append(f"{num_beyond} ledger rows are not counted yet")

    async def requests(self) -> None:
        """Each settled request has a row per choice, at its price, and no other has rows."""
        after: str | None = ""
        while after is not None:
            name, begin = opened.c.request_id, after
            ends = await self.rows(select(name).where(name > begin).order_by(name).offset(_RANGE_ROWS).limit(1))
            after = ends[0].request_id if ends else None
            range_ = [name > begin] if after is None else [name > begin, name <= after]
            counts = select(func.count().label("opened"), func.count(opened.c.settled_unix_us).label("settled"))
            (counted,) = await self.rows(counts.where(*range_))
            self.num_opened += counted.opened
            self.num_settled += counted.settled
            self.faults += await self._incomplete(range_)
            self.faults += await self._mispriced(range_)

    async def _incomplete(self, range_: Sequence[ColumnElement[bool]]) -> list[str]:
        """Settled requests without a row per choice, and unsettled requests with rows."""
        expected = case((opened.c.settled_unix_us.is_(None), 0), else_=opened.c.num_choices)
        num_rows = func.count(ledger.c.request_id)
        query = select(opened.c.request_id, expected.label("expected"), num_rows.label("num_rows")).where(*range_)
        of_settlement = (opened.c.request_id == ledger.c.request_id) & (ledger.c.supplement == 0)
        query = query.outerjoin_from(opened, ledger, of_settlement)
        query = query.group_by(opened.c.request_id, opened.c.num_choices, opened.c.settled_unix_us)
        return [
            f"request {row.request_id}: {row.expected} ledger rows expected, {row.num_rows} found"
            for row in await self.rows(query.having(num_rows != expected).limit(_MAX_FAULTS))
        ]

    async def _mispriced(self, range_: Sequence[ColumnElement[bool]]) -> list[str]:
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
        query = query.join(opened, ledger.c.request_id == opened.c.request_id).where(*range_)
        faults = []
        for row in await self.rows(query.where((cost != ledger.c.cost_nano) | has_more).limit(_MAX_FAULTS)):
            where = f"request {row.request_id} choice {row.choice}"
            if row.right != row.cost_nano:
                faults.append(f"{where}: costs {row.right} nano, billed {row.cost_nano}")
            if row.more:
                faults.append(f"{where}: more tokens than were opened")
        return faults

    async def registers(self, source: RegisterSource) -> int:
        """The sweep has billed no request for more than what its workers have reported until now; counts them."""
        num_found = 0
        swept = ledger.c.cause == FinishCause.GATEWAY_LOST, ledger.c.supplement == 0
        of_request = opened.c.request_id == ledger.c.request_id
        lost = select(opened.c.gateway_id).join_from(opened, ledger, of_request).where(*swept).distinct()
        for gateway in await self.rows(lost):
            after: str | None = ""
            while after is not None:
                query = select(opened, func.sum(ledger.c.num_output_tokens)).join_from(opened, ledger, of_request)
                query = query.where(*swept, opened.c.gateway_id == gateway.gateway_id, opened.c.request_id > after)
                query = query.group_by(*opened.c).order_by(opened.c.request_id).limit(_RANGE_REQUESTS)
                rows = await self.rows(query)
                after = rows[-1].request_id if len(rows) == _RANGE_REQUESTS else None
                billed = {row.request_id: (opened_of(row[:-1]), int(row[-1])) for row in rows}
                try:
                    reported = await source.read(gateway.gateway_id, billed.keys())
                except Unavailable as error:
                    self.faults.append(error.message)
                    return num_found
                num_found += len(reported)
                for request_id, choices in reported.items():
                    request, num_billed = billed[request_id]
                    num_reported = sum(each.num_output_tokens for each in usages_from_registers(request, choices))
                    if num_billed > num_reported:
                        told = f"{num_billed} output tokens billed by the sweep, {num_reported} in the registers"
                        self.faults.append(f"request {request_id}: {told}")
        return num_found

    async def hours(self, tenant_id: str) -> None:
        """The sums by hour are those of the ledger."""
        async for filter_ in self._ranges_of_hours(tenant_id):
            summed = rows_of_hours(filter_).add_columns(literal(1).label("sign"))
            rows = rows_of_ledger(filter_).where(ledger.c.ledger_id.is_not(None))
            rows = rows.add_columns(literal(-1).label("sign"))
            both = union_all(summed, rows).subquery().c
            more = {name: func.sum(both[name] * both.sign) for name in SUMS}
            group = (both.at_unix_us - both.at_unix_us % HOUR_US).label("hour"), both.key_id, both.model, both.price_id
            query = select(*group, *(sum_.label(name) for name, sum_ in more.items())).group_by(*group)
            for row in await self.rows(query.having(or_(*(sum_ != 0 for sum_ in more.values()))).limit(_MAX_FAULTS)):
                self.difference_nano += abs(int(row.cost_nano))
                named = ", ".join(f"{name} {int(getattr(row, name)):+d}" for name in SUMS if getattr(row, name))
                where = f"tenant {tenant_id} hour {row.hour} {row.key_id} {row.model} {row.price_id}"
                self.faults.append(f"{where}: the sums differ from the ledger by {named}")

    async def _ranges_of_hours(self, tenant_id: str) -> AsyncIterator[UsageFilter]:
        """Periods of whole hours, each with about as many ledger rows."""
        begin: int | None = None
        is_last = False
        while not is_last:
            rows = rows_of_ledger(UsageFilter(tenant_id, from_unix_us=begin)).with_only_columns(
                ledger.c.settled_unix_us
            )
            next_rows = await self.rows(rows.order_by(ledger.c.settled_unix_us).offset(_RANGE_ROWS).limit(1))
            is_last = not next_rows
            end = None if is_last else hour_of(next_rows[0].settled_unix_us) + HOUR_US
            yield UsageFilter(tenant_id, from_unix_us=begin, to_unix_us=end)
            begin = end

    async def balance(self, tenant_id: str) -> None:
        """The balance is the sum of the tenant's usage and adjustments."""

        def sum_of(column: Any, *conditions: ColumnElement[bool]) -> Any:
            total = select(func.coalesce(func.sum(column), 0)).where(column.table.c.tenant_id == tenant_id, *conditions)
            return total.scalar_subquery()

        uncounted = sum_of(ledger.c.cost_nano, ledger.c.ledger_id.is_(None))
        used = sum_of(usage_hours.c.cost_nano) + uncounted
        columns = sum_of(balances.c.spent_nano), used, sum_of(adjustments.c.amount_nano)
        spent, used, adjusted = map(int, (await self.rows(select(*columns)))[0])
        self.adjusted_nano += adjusted
        self.difference_nano += abs(spent - used - adjusted)
        if spent != used + adjusted:
            more = f", adjustments to {adjusted}" if adjusted else ""
            self.faults.append(f"tenant {tenant_id}: the balance is {spent} nano, the ledger sums to {used}{more}")
