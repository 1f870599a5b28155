"""Invoices: the usage of a tenant in a month, with adjustments; once closed, numbered and final.

Usage counts in the month of its settlement, whenever its request was opened. A closed month takes no adjustments; its
usage is final because it can be closed only after ``SETTLED_AFTER_US``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime

from sqlalchemy import insert, select, update

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import Conflict, InvalidRequest
from torchrelay.common.ids import new_id
from torchrelay.gateway.billing.bills import Adjustment, Invoice, month_bounds
from torchrelay.gateway.billing.money import dollars
from torchrelay.gateway.billing.usage_query import UsageFilter, billed_sums
from torchrelay.gateway.sql.audit import record
from torchrelay.gateway.sql.database import Database, SqlConnection
from torchrelay.gateway.sql.event_outbox import emit
from torchrelay.gateway.sql.tables import adjustments, balances, counters, invoices, tenants

# From the end of a month until all its settlements are committed: longer than a transaction lasts, than the clocks of
# gateways differ, and than it takes to count the rows of a gateway of the release before.
SETTLED_AFTER_US = 3_600_000_000


class Invoices:
    """Owns the tables of invoices and adjustments."""

    def __init__(self, database: Database, clock: Callable[[], int] = now_unix_us) -> None:
        self._database, self._clock_unix_us = database, clock

    async def invoice(self, tenant_id: str, period: str) -> Invoice:
        """The invoice of a month, or what it would be now. Raises ``InvalidRequest`` for another period."""
        begin, end = month_bounds(period)
        lines = await billed_sums(self._database, UsageFilter(tenant_id, from_unix_us=begin, to_unix_us=end))
        async with self._database.read() as connection:
            name = select(tenants.c.name).where(tenants.c.tenant_id == tenant_id)
            tenant: str = (await connection.execute(name)).scalar_one()
            adjusted = await _adjustments(connection, tenant_id, period)
            of_month = invoices.c.tenant_id == tenant_id, invoices.c.period == period
            row = (await connection.execute(select(invoices).where(*of_month))).first()
        number, closed = (None, None) if row is None else (row.number, row.closed_unix_us)
        return Invoice(tenant, period, tuple(lines), adjusted, number, closed)

    async def close(self, tenant_ids: Sequence[str], period: str) -> list[Invoice]:
        """The invoices of these tenants, numbered from now on; without those who have nothing to pay for.

        Invoices that were closed before stay as they are. Raises ``InvalidRequest`` before the month is settled.
        """
        end = month_bounds(period)[1]
        if self._clock_unix_us() < end + SETTLED_AFTER_US:
            earliest = datetime.fromtimestamp((end + SETTLED_AFTER_US) / 1e6, UTC).isoformat()
            raise InvalidRequest(f"{period} can be closed from {earliest} on, not earlier", field="period")
        return [invoice for each in tenant_ids if (invoice := await self._close(each, period)) is not None]

    async def _close(self, tenant_id: str, period: str) -> Invoice | None:
        draft = await self.invoice(tenant_id, period)
        if draft.number is not None:
            return draft
        async with self._database.write() as connection:
            last = await _lock(connection)
            draft = replace(draft, adjustments=await _adjustments(connection, tenant_id, period))
            row = {"tenant_id": tenant_id, "period": period, "number": last + 1}
            row |= {"total_nano": draft.amount_nano, "closed_unix_us": self._clock_unix_us()}
            if not draft.lines and not draft.adjustments:
                return None
            new = self._database.insert(invoices).values(row).on_conflict_do_nothing()  # another gateway closed it
            if (await connection.execute(new)).rowcount:
                closed = {"number": last + 1, "total_nano": draft.amount_nano}
                await emit(
                    connection, "invoice.closed", tenant_id, {"tenant": draft.tenant, "period": period, **closed}
                )
                await record(connection, "invoice.close", f"{draft.tenant} {period}", tenant_id, None, closed)
                await connection.execute(update(counters).where(counters.c.name == "invoices").values(last=last + 1))
        return await self.invoice(tenant_id, period)

    async def adjust(self, tenant_id: str, period: str, amount_nano: int, reason: str) -> Adjustment:
        """Adds a charge, or a credit if the amount is negative, to an open month and to the balance.

        Raises ``Conflict`` for a closed month, and ``InvalidRequest`` for a later month than the present one and for a
        credit of more than the tenant has spent.
        """
        now = self._clock_unix_us()
        if month_bounds(period)[0] > now:
            raise InvalidRequest("period must be the present month or an earlier one", field="period")
        adjustment = Adjustment(new_id("adj"), tenant_id, period, amount_nano, reason, now)
        async with self._database.write() as connection:
            await _lock(connection)
            is_closed = select(invoices.c.number).where(invoices.c.tenant_id == tenant_id)
            if (await connection.execute(is_closed.where(invoices.c.period == period))).first() is not None:
                raise Conflict(f"{period} is closed; adjust a later month", field="period")
            spent = balances.c.spent_nano + amount_nano
            charge = update(balances).where(balances.c.tenant_id == tenant_id, spent >= 0)
            if (await connection.execute(charge.values(spent_nano=spent))).rowcount == 0:
                message = f"a credit of {dollars(-amount_nano)} is more than the tenant has spent"
                raise InvalidRequest(message, field="amount_nano")
            await connection.execute(insert(adjustments).values(asdict(adjustment)))
            added = {"period": period, "amount_nano": amount_nano, "reason": reason}
            await record(connection, "adjustment.add", adjustment.adjustment_id, tenant_id, None, added)
        return adjustment


async def _lock(connection: SqlConnection) -> int:
    """The last number of an invoice; closing and adjusting wait for each other's commit."""
    touch = update(counters).where(counters.c.name == "invoices").values(last=counters.c.last)
    last: int = (await connection.execute(touch.returning(counters.c.last))).scalar_one()
    return last


async def _adjustments(connection: SqlConnection, tenant_id: str, period: str) -> tuple[Adjustment, ...]:
    query = select(adjustments).where(adjustments.c.tenant_id == tenant_id, adjustments.c.period == period)
    query = query.order_by(adjustments.c.created_unix_us, adjustments.c.adjustment_id)
    return tuple(Adjustment(*row) for row in await connection.execute(query))
