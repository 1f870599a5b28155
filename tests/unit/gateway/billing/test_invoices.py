from __future__ import annotations

import asyncio

import pytest

from tests.unit.gateway.conftest import AccountingRig
from torchrelay.common.errors import Conflict, InvalidRequest
from torchrelay.gateway.billing.bills import month_bounds
from torchrelay.gateway.billing.invoices import SETTLED_AFTER_US, Invoices
from torchrelay.gateway.billing.ledger import Ledger
from torchrelay.gateway.billing.reconciliation import reconcile
from torchrelay.gateway.core import ChoiceUsage, FinishCause

END = month_bounds("2026-11")[1]


async def test_usage_is_of_the_month_of_its_settlement_and_final_an_hour_later(parts: AccountingRig) -> None:
    """A request of the last second of a month is in the next month's invoice if it ends there."""
    for name, at in (("req-before", END - 1), ("req-after", END)):
        async with Ledger(parts.database, lambda at=at: at) as then:  # type: ignore[misc]
            await then.open(parts.request(name))
            await then.settle(name, [ChoiceUsage(name, 0, 10, 0, 3, FinishCause.STOP)])
    early = Invoices(parts.database, lambda: END + SETTLED_AFTER_US - 1)
    with pytest.raises(InvalidRequest, match="from 2026-12-01T01:00:00"):
        await early.close([parts.acme.tenant_id], "2026-11")
    late = Invoices(parts.database, lambda: END + SETTLED_AFTER_US)
    (closed,) = await late.close([parts.acme.tenant_id], "2026-11")
    assert [(line.requests, line.completion_tokens) for line in closed.lines] == [(1, 3)]
    assert len((await late.invoice(parts.acme.tenant_id, "2026-12")).lines) == 1
    assert (await reconcile(parts.database)).faults == ()


async def test_closing_and_adjusting_at_once_leave_the_total_of_the_invoice_right(parts: AccountingRig) -> None:
    """Gateways that close at the same moment give one number per tenant; an adjustment comes before or not at all."""
    tenants = [parts.acme.tenant_id, *[(await parts.tenants.create(f"other-{index}")).tenant_id for index in range(4)]]
    gateways = [Invoices(parts.database, lambda: END + SETTLED_AFTER_US) for _ in range(3)]
    for tenant in tenants:
        await gateways[0].adjust(tenant, "2026-11", 10**9, "set-up")
    adjusting = [
        each.adjust(tenant, "2026-11", 10**9, "late") for each in gateways for tenant in tenants for _ in range(3)
    ]
    closing = [each.close(tenants, "2026-11") for each in gateways]
    results = await asyncio.gather(*closing, *adjusting, return_exceptions=True)
    assert {type(result) for result in results if isinstance(result, BaseException)} <= {Conflict}
    invoices = [await gateways[0].invoice(tenant, "2026-11") for tenant in tenants]
    assert sorted(each.number or 0 for each in invoices) == [1, 2, 3, 4, 5]
    assert all(result == invoices for result in results[:3])
    books = await reconcile(parts.database)
    assert (books.faults, books.difference_nano) == ((), 0)
    assert books.adjusted_nano == sum(each.cost_nano for each in invoices)
