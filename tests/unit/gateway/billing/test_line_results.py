"""A batch's line is billed in the transaction that keeps its result, once, whoever runs it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from sqlalchemy import insert, select, update

from tests.unit.gateway.conftest import AccountingRig
from torchrelay.gateway.billing.ledger import Ledger
from torchrelay.gateway.billing.line_results import LineLost
from torchrelay.gateway.billing.reconciliation import reconcile
from torchrelay.gateway.core import ChoiceUsage, FinishCause, LineResult
from torchrelay.gateway.sql.tables import balances, batch_results, batches

COST = 10 * 100 + 3 * 400


def used(request_id: str, cause: FinishCause = FinishCause.STOP, num_output: int = 3) -> tuple[str, list[ChoiceUsage]]:
    return request_id, [ChoiceUsage(request_id, 0, 10, 0, num_output, cause)]


def result(request_id: str, line: int = 0) -> LineResult:
    return LineResult("batch-1", line, request_id, 200, f'{{"id": "{request_id}"}}')


@pytest.fixture(autouse=True)
async def batch(parts: AccountingRig) -> None:
    row = {"batch_id": "batch-1", "tenant_id": parts.acme.tenant_id, "key_id": "key-1", "endpoint": "/v1/completions"}
    row |= {"input_file_id": "file-1", "metadata": "{}", "status": "in_progress"}
    async with parts.database.write() as connection:
        await connection.execute(insert(batches).values(row | {"created_unix_us": 1, "expires_unix_us": 2}))


async def opened(parts: AccountingRig, *request_ids: str) -> None:
    for request_id in request_ids:
        await parts.ledger.open(replace(parts.request(request_id), batch_id="batch-1"))


async def books(parts: AccountingRig) -> tuple[list[str], int]:
    """The attempts whose results are kept, and what the tenant pays. The books are in order."""
    assert (await reconcile(parts.database)).faults == ()
    async with parts.database.read() as connection:
        kept = (await connection.execute(select(batch_results.c.request_id).order_by(batch_results.c.line))).scalars()
        return list(kept), (await connection.execute(select(balances.c.spent_nano))).scalar_one()


async def test_two_attempts_at_a_line_pay_once(parts: AccountingRig) -> None:
    await opened(parts, "a", "b")
    async with Ledger(parts.database) as elsewhere:
        ends = await asyncio.gather(
            parts.ledger.settle_line(result("a"), [used("a")]),
            elsewhere.settle_line(result("b"), [used("b")]),
            return_exceptions=True,
        )
    assert sorted(map(type, ends), key=str) == [int, LineLost]
    kept, spent = await books(parts)
    assert kept == ["a" if ends[0] == COST else "b"] and spent == COST


async def test_repeated_settlement_reports_what_stands(parts: AccountingRig) -> None:
    await opened(parts, "a", "a-1")
    for _ in range(2):
        assert await parts.ledger.settle_line(result("a"), [used("a"), used("a-1")]) == 2 * COST
    assert await books(parts) == (["a"], 2 * COST)


async def test_late_result_of_a_gateway_taken_for_gone_is_lost(parts: AccountingRig) -> None:
    await opened(parts, "late", "again")
    await parts.ledger.settle(*used("late", FinishCause.GATEWAY_LOST, num_output=0)[:1], [])
    with pytest.raises(LineLost):
        await parts.ledger.settle_line(result("late"), [used("late")])
    assert await books(parts) == ([], 0)
    assert await parts.ledger.settle_line(result("again"), [used("again")]) == COST
    assert await books(parts) == (["again"], COST)


async def test_batch_that_takes_no_more_results_bills_none(parts: AccountingRig) -> None:
    await opened(parts, "a")
    async with parts.database.write() as connection:
        await connection.execute(update(batches).values(status="cancelling"))
    with pytest.raises(LineLost):
        await parts.ledger.settle_line(result("a"), [used("a")])
    assert await books(parts) == ([], 0)


async def test_refused_line_has_a_result_without_requests(parts: AccountingRig) -> None:
    await opened(parts, "a")
    ends = await asyncio.gather(
        parts.ledger.settle_line(replace(result("refused", 1), status=400), []),
        parts.ledger.settle_line(result("a"), [used("a")]),
    )
    assert list(ends) == [0, COST]
    assert await books(parts) == (["a", "refused"], COST)
