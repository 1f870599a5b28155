from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import update

from tests.unit.gateway.conftest import AccountingRig
from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.billing.usage_query import (
    MAX_MINUTES,
    GroupBy,
    UsageFilter,
    billed_sums,
    end_of,
    instant_of,
    usage_sums,
)
from torchrelay.gateway.core import ChoiceUsage, FinishCause
from torchrelay.gateway.sql.tables import ledger

DAY = 86_400_000_000
NOON = instant_of("2026-11-20T12:00:00Z", "from")


@pytest.fixture
async def settled(parts: AccountingRig) -> AccountingRig:
    """Three requests of acme (two keys, two models, two days, two choices in the first) and one of another tenant."""
    other = await parts.tenants.create("other")
    requests = [
        parts.request("req-1", num_choices=2),
        replace(parts.request("req-2"), key_id="key-2"),
        replace(parts.request("req-3"), model="acme/story"),
        replace(parts.request("req-4"), tenant_id=other.tenant_id, model="other/m"),
    ]
    for index, request in enumerate(requests):
        await parts.ledger.open(request)
        usages = [
            ChoiceUsage(request.request_id, choice, 10, 4, 5, FinishCause.STOP) for choice in range(request.num_choices)
        ]
        await parts.ledger.settle(request.request_id, usages)
        async with parts.database.write() as connection:
            when = update(ledger).where(ledger.c.request_id == request.request_id)
            await connection.execute(when.values(settled_unix_us=NOON + (index // 2) * DAY))
    return parts


@pytest.mark.parametrize(
    ("group_by", "expected"),
    [
        ("key", {"key-1": (20, 15, 2), "key-2": (10, 5, 1)}),
        ("model", {"acme/glossary": (20, 15, 2), "acme/story": (10, 5, 1)}),
        ("day", {"2026-11-20": (20, 15, 2), "2026-11-21": (10, 5, 1)}),
        (None, {"": (30, 20, 3)}),
    ],
)
async def test_sums_by_group(
    settled: AccountingRig, group_by: GroupBy | None, expected: dict[str, tuple[int, int, int]]
) -> None:
    sums = await usage_sums(settled.database, UsageFilter(tenant_id=settled.acme.tenant_id), group_by)
    assert {total.group: (total.prompt_tokens, total.completion_tokens, total.requests) for total in sums} == expected
    assert sum(total.cost_nano for total in sums) == 3 * (600 + 100) + 20 * 400


async def test_sums_by_minute_are_of_recent_days(settled: AccountingRig) -> None:
    minute_us = 60_000_000
    minute = now_unix_us() // minute_us
    async with settled.database.write() as connection:
        await connection.execute(update(ledger).values(settled_unix_us=(minute - 1) * minute_us + 1))
    acme = UsageFilter(tenant_id=settled.acme.tenant_id, from_unix_us=(minute - 60) * minute_us)
    (total,) = await usage_sums(settled.database, acme, "minute")
    assert (instant_of(total.group, "from"), total.requests) == ((minute - 1) * minute_us, 3)
    for begin in (None, (minute - MAX_MINUTES - 1) * minute_us):
        with pytest.raises(InvalidRequest, match="of the last 48 hours"):
            await usage_sums(settled.database, replace(acme, from_unix_us=begin), "minute")


async def test_filters_combine(settled: AccountingRig) -> None:
    acme = UsageFilter(tenant_id=settled.acme.tenant_id)
    for wanted, num_requests in (
        (replace(acme, key_id="key-2"), 1),
        (replace(acme, model="acme/story"), 1),
        (replace(acme, from_unix_us=NOON, to_unix_us=NOON + DAY), 2),
        (replace(acme, from_unix_us=NOON + 1), 1),
        (replace(acme, key_id="key-9"), 0),
        (UsageFilter(), 4),
    ):
        (total,) = await usage_sums(settled.database, wanted, None)
        assert total.requests == num_requests


async def test_bill_has_a_sum_per_model_and_price(settled: AccountingRig) -> None:
    price = await settled.prices.add("acme/story", 1, 1, 1)
    request = replace(settled.request("req-9"), model="acme/story", price_id=price.price_id)
    await settled.ledger.open(request)
    await settled.ledger.settle("req-9", [ChoiceUsage("req-9", 0, 10, 0, 2, FinishCause.STOP)])
    sums = await billed_sums(settled.database, UsageFilter(tenant_id=settled.acme.tenant_id))
    assert [(total.model, total.output_nano, total.completion_tokens, total.cost_nano) for total in sums] == [
        ("acme/glossary", 400, 15, 2 * 700 + 15 * 400),
        ("acme/story", 400, 5, 700 + 5 * 400),
        ("acme/story", 1, 2, 12),
    ]


def test_date_as_end_includes_its_day() -> None:
    assert end_of("2026-11-20", "to") == instant_of("2026-11-21", "to")
    assert end_of("2026-11-20T12:00:00Z", "to") == end_of(str(NOON // 10**6), "to") == NOON


def test_times_are_read_as_utc() -> None:
    assert instant_of("2026-11-20", "from") == NOON - DAY // 2
    assert instant_of("2026-11-20T13:00:00+01:00", "from") == NOON
    assert instant_of(str(NOON // 10**6), "from") == NOON
    for unescaped in ("2026-11-20T13:00:00 01:00", "2026-11-20T13:00 01:00", "2026-11-20T13:00:00.000 0100"):
        assert instant_of(unescaped, "from") == NOON
    assert instant_of("2026-11-20 12:00", "from") == NOON
    for wrong in ("", "yesterday", "2026-13-01", "12", "9" * 30):
        with pytest.raises(InvalidRequest) as raised:
            instant_of(wrong, "from")
        assert raised.value.field == "from"
