from __future__ import annotations

from sqlalchemy import delete, update

from tests.unit.gateway.conftest import AccountingRig
from torchrelay.gateway.billing.reconciliation import reconcile
from torchrelay.gateway.core import ChoiceUsage, FinishCause
from torchrelay.gateway.sql.tables import balances, ledger


async def _settled(parts: AccountingRig) -> None:
    await parts.ledger.open(parts.request())
    await parts.ledger.settle("req-1", [ChoiceUsage("req-1", 0, 10, 0, 3, FinishCause.STOP)])


async def test_consistent_books_have_no_faults(parts: AccountingRig) -> None:
    await _settled(parts)
    await parts.ledger.open(parts.request("req-running"))
    books = await reconcile(parts.database)
    assert (books.num_opened, books.num_settled, books.num_ledger_rows) == (2, 1, 1)
    assert (books.cost_nano, books.faults) == (2200, ())


async def test_wrong_balance_is_reported(parts: AccountingRig) -> None:
    await _settled(parts)
    async with parts.database.write() as connection:
        await connection.execute(update(balances).values(spent_nano=1))
    (fault,) = (await reconcile(parts.database)).faults
    assert "the balance is 1 nano, the ledger sums to 2200" in fault


async def test_missing_row_is_reported(parts: AccountingRig) -> None:
    await _settled(parts)
    async with parts.database.write() as connection:
        await connection.execute(delete(ledger))
    faults = (await reconcile(parts.database)).faults
    assert "request req-1: 1 ledger rows expected, 0 found" in faults


async def test_wrong_cost_and_excess_tokens_are_reported(parts: AccountingRig) -> None:
    await _settled(parts)
    async with parts.database.write() as connection:
        await connection.execute(update(ledger).values(num_output_tokens=1000))
    faults = (await reconcile(parts.database)).faults
    assert len(faults) == 2
    assert "billed 2200" in faults[0]
    assert "more tokens than were opened" in faults[1]
