from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from sqlalchemy import Delete, Update, delete, func, select, update
from sqlalchemy.exc import IntegrityError

from tests.unit.gateway.conftest import AccountingRig
from torchrelay.common.errors import NotFound, Unavailable
from torchrelay.gateway.billing import reconciliation
from torchrelay.gateway.billing.invoices import Invoices
from torchrelay.gateway.billing.ledger import Ledger
from torchrelay.gateway.billing.reconciliation import reconcile
from torchrelay.gateway.billing.usage_query import UsageFilter, usage_sums
from torchrelay.gateway.core import ChoiceUsage, FinishCause
from torchrelay.gateway.sql.tables import adjustments, balances, counters, invoices, ledger, opened, usage_hours


def usage(request_id: str = "req-1", choice: int = 0, num_output: int = 3) -> ChoiceUsage:
    return ChoiceUsage(request_id, choice, 10, 4, num_output, FinishCause.STOP)


COST = 6 * 100 + 4 * 25 + 3 * 400


async def spent(parts: AccountingRig) -> int:
    async with parts.database.read() as connection:
        spent: int = (await connection.execute(select(balances.c.spent_nano))).scalar_one()
    return spent


async def test_request_is_opened_and_settled_with_its_cost(parts: AccountingRig) -> None:
    await parts.ledger.open(parts.request())
    assert await spent(parts) == 0
    assert await parts.ledger.settle("req-1", [usage()]) == COST
    assert await spent(parts) == COST
    async with parts.database.read() as connection:
        row = (await connection.execute(select(ledger))).one()
    assert (row.num_prompt_tokens, row.num_cached_prompt_tokens, row.num_output_tokens) == (10, 4, 3)
    assert (row.cause, row.key_id, row.model, row.price_id) == ("stop", "key-1", "acme/glossary", "price-default")
    assert (await reconcile(parts.database)).faults == ()


async def test_second_settlement_and_second_opening_change_nothing(parts: AccountingRig) -> None:
    await parts.ledger.open(parts.request())
    await parts.ledger.settle("req-1", [usage()])
    assert await parts.ledger.settle("req-1", [usage(num_output=99)]) == COST
    assert await spent(parts) == COST
    await parts.ledger.open(replace(parts.request(), num_prompt_tokens=999))
    async with parts.database.read() as connection:
        row = (await connection.execute(select(opened))).one()
    assert row.num_prompt_tokens == 10
    assert row.settled_unix_us is not None


async def test_faulty_write_fails_alone(parts: AccountingRig) -> None:
    bad = replace(parts.request("req-bad"), tenant_id="nobody")
    first, foreign, second = await asyncio.gather(
        *(parts.ledger.open(request) for request in (parts.request("req-1"), bad, parts.request("req-2"))),
        return_exceptions=True,
    )
    assert first is second is None and isinstance(foreign, IntegrityError)
    async with parts.database.read() as connection:
        assert set((await connection.execute(select(opened.c.request_id))).scalars()) == {"req-1", "req-2"}
    settlements = (parts.ledger.settle(name, [usage(name)]) for name in ("req-1", "req-unopened"))
    good, unopened = await asyncio.gather(*settlements, return_exceptions=True)
    assert good == COST and isinstance(unopened, NotFound)


async def test_concurrent_writes_share_commits_and_add_up(parts: AccountingRig) -> None:
    async def open_and_settle(index: int) -> None:
        request = parts.request(f"req-{index}", num_choices=2)
        await parts.ledger.open(request)
        await parts.ledger.settle(request.request_id, [usage(request.request_id, choice) for choice in (0, 1)])

    await asyncio.gather(*(open_and_settle(index) for index in range(400)))
    books = await reconcile(parts.database)
    assert (books.num_settled, books.num_ledger_rows, books.faults) == (400, 800, ())
    assert await spent(parts) == 400 * (COST + 3 * 400)


async def test_books_are_compared_in_ranges(parts: AccountingRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any size: what is at a range's end is in one range."""
    other = await parts.tenants.create("other")
    for index in range(12):
        request = replace(parts.request(f"req-{index}"), tenant_id=(parts.acme, other)[index % 2].tenant_id)
        async with Ledger(parts.database, lambda index=index: index // 3 * 1_800_000_000) as then:  # type: ignore[misc]
            await then.open(request)
            await then.settle(request.request_id, [usage(request.request_id)])
    whole = await reconcile(parts.database)
    assert (whole.num_opened, whole.num_ledger_rows, whole.cost_nano, whole.faults) == (12, 12, 12 * COST, ())
    for num_rows in range(1, 14):
        monkeypatch.setattr(reconciliation, "_RANGE_ROWS", num_rows)
        assert await reconcile(parts.database) == whole
    async with parts.database.write() as connection:
        await connection.execute(update(ledger).where(ledger.c.request_id == "req-8").values(cost_nano=COST + 1))
    for num_rows in (1, 3, 50):
        monkeypatch.setattr(reconciliation, "_RANGE_ROWS", num_rows)
        books = await reconcile(parts.database)
        assert (books.difference_nano, len(books.faults)) == (1, 2)


async def test_two_gateways_bill_each_request_once(parts: AccountingRig) -> None:
    ids = [f"req-{index}" for index in range(50)]
    await asyncio.gather(*(parts.ledger.open(parts.request(request_id)) for request_id in ids))
    async with Ledger(parts.database) as elsewhere:
        costs = await asyncio.gather(
            *(parts.ledger.settle(request_id, [usage(request_id)]) for request_id in ids),
            *(elsewhere.settle(request_id, [usage(request_id, num_output=5)]) for request_id in reversed(ids)),
        )
    assert all(costs[index] == costs[99 - index] for index in range(50))  # both report the cost that stands
    books = await reconcile(parts.database)
    assert (books.num_ledger_rows, books.faults) == (50, ())


async def test_exit_commits_waiting_writes_and_refuses_new_ones(parts: AccountingRig) -> None:
    ending = Ledger(parts.database)
    async with ending:
        opening = asyncio.create_task(ending.open(parts.request("req-late")))
        await asyncio.sleep(0)
    await opening
    with pytest.raises(Unavailable):
        await ending.open(parts.request("req-too-late"))
    async with parts.database.read() as connection:
        assert (await connection.execute(select(func.count()).select_from(opened))).scalar_one() == 1


async def test_rows_are_numbered_in_the_order_of_commits(parts: AccountingRig) -> None:
    """A reader that polls for larger numbers sees each row once, although two gateways write."""
    num_requests, seen = 200, [0]
    query = select(ledger.c.ledger_id).order_by(ledger.c.ledger_id)

    async def settle_all(by: Ledger, name: str) -> None:
        async def one(request_id: str) -> None:
            await by.open(parts.request(request_id, num_choices=2))
            await by.settle(request_id, [usage(request_id)])

        await asyncio.gather(*(one(f"req-{name}-{index}") for index in range(num_requests)))

    async def poll() -> None:
        while len(seen) <= 4 * num_requests:
            async with parts.database.read() as connection:
                seen.extend((await connection.execute(query.where(ledger.c.ledger_id > seen[-1]))).scalars())

    async with Ledger(parts.database) as elsewhere, asyncio.timeout(60):
        await asyncio.gather(settle_all(parts.ledger, "a"), settle_all(elsewhere, "b"), poll())
    assert seen == list(range(4 * num_requests + 1))
    assert (await reconcile(parts.database)).faults == ()


async def test_rows_of_the_release_before_are_counted_once(parts: AccountingRig) -> None:
    await parts.ledger.open(parts.request())
    await parts.ledger.settle("req-1", [usage()])
    async with parts.database.write() as connection:  # as a gateway of the release before leaves it
        await connection.execute(update(ledger).values(ledger_id=None))
        await connection.execute(update(counters).values(last=0))
        await connection.execute(delete(usage_hours))
    books = await reconcile(parts.database)
    assert (books.difference_nano, books.faults) == (0, ("1 ledger rows are not counted yet",))
    (total,) = await usage_sums(parts.database, UsageFilter(), None)
    assert (total.requests, total.cost_nano) == (1, COST), "usage is complete before"
    async with Ledger(parts.database) as elsewhere:
        await asyncio.gather(*(each.count_uncounted() for each in (parts.ledger, elsewhere) for _ in range(3)))
    async with parts.database.read() as connection:
        assert (await connection.execute(select(ledger.c.ledger_id))).scalars().all() == [1]
        assert (await connection.execute(select(usage_hours.c.num_requests, usage_hours.c.cost_nano))).all() == [
            (1, COST)
        ]
    assert (await reconcile(parts.database)).faults == ()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (None, []),
        (update(balances).values(spent_nano=1), ["the balance is 1 nano, the ledger sums to 2200"]),
        (delete(ledger), ["request req-1: 1 ledger rows expected, 0 found", "ledger ids 1 to 1: 0 rows found"]),
        (update(ledger).values(num_output_tokens=1000), ["billed 2200", "more tokens than were opened"]),
        (update(usage_hours).values(num_requests=3), ["the sums differ from the ledger by num_requests +2"]),
        (delete(usage_hours), ["num_requests -1", "cost_nano -2200", "the ledger sums to 0"]),
        (update(ledger).values(ledger_id=7), ["ledger ids 1 to 1: 0 rows found", "1 ledger rows are not counted yet"]),
        (delete(adjustments), ["the balance is 12200 nano, the ledger sums to 2200"]),
        (update(invoices).values(total_nano=5), ["invoice 1: closed at 5 nano, its lines sum to 0"]),
    ],
    ids=["none", "balance", "missing row", "tokens", "hour", "missing hour", "number", "adjustment", "invoice"],
)
async def test_faults_of_the_books_are_reported(
    parts: AccountingRig, change: Update | Delete | None, expected: list[str]
) -> None:
    await parts.ledger.open(parts.request())
    await parts.ledger.settle("req-1", [ChoiceUsage("req-1", 0, 10, 0, 3, FinishCause.STOP)])
    await parts.ledger.open(parts.request("req-running"))
    if change is not None and change.table in (adjustments, invoices):
        issued = Invoices(parts.database)
        await issued.adjust(parts.acme.tenant_id, "2026-01", 10_000, "a cent's thousandth")
        await issued.close([parts.acme.tenant_id], "2026-01")
    if change is not None:
        async with parts.database.write() as connection:
            await connection.execute(change)
    books = await reconcile(parts.database)
    assert all(any(said in fault for fault in books.faults) for said in expected), books.faults
    if change is None:
        assert (books.num_opened, books.num_settled, books.num_ledger_rows) == (2, 1, 1)
        assert (books.cost_nano, books.faults) == (2200, ())
    elif "balance" in expected[0]:
        assert len(books.faults) == 1 and books.difference_nano != 0
