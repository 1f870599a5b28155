from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from sqlalchemy import Row, select, update

from tests.unit.gateway.conftest import AccountingRig
from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.billing import request_query
from torchrelay.gateway.billing.ledger import Ledger
from torchrelay.gateway.billing.request_query import _FAILURES, Status, newest_requests, request_of
from torchrelay.gateway.billing.usage_query import (
    MAX_MINUTES,
    GroupBy,
    UsageFilter,
    billed_sums,
    end_of,
    instant_of,
    total_of,
    usage_sums,
)
from torchrelay.gateway.core import ChoiceUsage, FinishCause, OpenedRequest
from torchrelay.gateway.sql.tables import ledger, opened

HOUR = 3_600_000_000
DAY = 24 * HOUR
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
        await settle(parts, request, NOON + (index // 2) * DAY)
    return parts


async def settle(rig: AccountingRig, request: OpenedRequest, at_unix_us: int, num_output: int = 5) -> None:
    """Opens a request and settles it at a time."""
    choices = range(request.num_choices)
    usages = [ChoiceUsage(request.request_id, choice, 10, 4, num_output, FinishCause.STOP) for choice in choices]
    async with Ledger(rig.database, lambda: at_unix_us) as at_that_time:
        await at_that_time.open(request)
        await at_that_time.settle(request.request_id, usages)


async def test_sums_by_group(settled: AccountingRig) -> None:
    groups: dict[GroupBy | None, dict[str, tuple[int, int, int]]] = {
        "key": {"key-1": (20, 15, 2), "key-2": (10, 5, 1)},
        "model": {"acme/glossary": (20, 15, 2), "acme/story": (10, 5, 1)},
        "day": {"2026-11-20": (20, 15, 2), "2026-11-21": (10, 5, 1)},
        None: {"": (30, 20, 3)},
    }
    for group_by, expected in groups.items():
        sums = await usage_sums(settled.database, UsageFilter(tenant_id=settled.acme.tenant_id), group_by)
        assert {each.group: (each.prompt_tokens, each.completion_tokens, each.requests) for each in sums} == expected
        assert sum(total.cost_nano for total in sums) == 3 * (600 + 100) + 20 * 400


@pytest.fixture
async def scattered(parts: AccountingRig) -> AccountingRig:
    """Requests of two tenants over some hours around noon, one of them with a supplement, and rows on the hour."""
    other = await parts.tenants.create("other")
    price = await parts.prices.add("acme/story", 7, 1, 3)
    offsets = [-2 * HOUR - 1, -2 * HOUR, -HOUR - 7, -HOUR, -1, 0, 1, HOUR // 2, HOUR - 1, HOUR, 2 * HOUR + 5]
    for index, offset in enumerate(offsets):
        request = parts.request(f"req-{index}", num_choices=1 + index % 2)
        if index % 3 == 0:
            request = replace(request, model="acme/story", price_id=price.price_id, key_id="key-2")
        if index % 5 == 0:
            request = replace(request, tenant_id=other.tenant_id)
        await settle(parts, request, NOON + offset, num_output=index)
    async with Ledger(parts.database, lambda: NOON - 5) as swept:
        await swept.open(parts.request("req-swept"))
        await swept.settle("req-swept", [ChoiceUsage("req-swept", 0, 10, 4, 1, FinishCause.GATEWAY_LOST)])
    async with Ledger(parts.database, lambda: NOON + HOUR + 3) as stalled:
        await stalled.settle("req-swept", [ChoiceUsage("req-swept", 0, 10, 4, 9, FinishCause.STOP)])
    return parts


async def test_sums_of_any_period_are_those_of_its_ledger_rows(scattered: AccountingRig) -> None:
    async with scattered.database.read() as connection:
        rows = (await connection.execute(select(ledger))).all()
    assert len([row for row in rows if row.supplement]) == 1

    def plain(filter_: UsageFilter) -> list[Row[Any]]:
        begin, end = filter_.from_unix_us, filter_.to_unix_us
        return [
            row
            for row in rows
            if filter_.tenant_id in (None, row.tenant_id)
            and filter_.model in (None, row.model)
            and (begin is None or begin <= row.settled_unix_us)
            and (end is None or row.settled_unix_us < end)
        ]

    chosen = random.Random(7)
    edges = [
        None,
        *{row.settled_unix_us + step for row in rows for step in (0, 1)},
        *(NOON + HOUR * i for i in (-1, 2)),
    ]
    for _ in range(60):
        filter_ = UsageFilter(
            tenant_id=chosen.choice([None, scattered.acme.tenant_id]),
            model=chosen.choice([None, "acme/story"]),
            from_unix_us=chosen.choice(edges),
            to_unix_us=chosen.choice(edges),
        )
        expected = plain(filter_)
        cost = sum(row.cost_nano for row in expected)
        firsts = {row.request_id for row in expected if row.choice == 0 and row.supplement == 0}
        (total,) = await usage_sums(scattered.database, filter_, None)
        tokens = sum(row.num_prompt_tokens for row in expected), sum(row.num_output_tokens for row in expected)
        assert (total.cost_nano, total.requests) == (cost, len(firsts)), filter_
        assert (total.prompt_tokens, total.completion_tokens) == tokens, filter_
        for group_by, name in (("key", "key_id"), ("model", "model")):
            sums = await usage_sums(scattered.database, filter_, cast(GroupBy, group_by))
            costs = Counter[str]()
            for row in expected:
                costs[getattr(row, name)] += row.cost_nano
            assert {each.group: each.cost_nano for each in sums if each.cost_nano} == +costs, filter_
            assert total_of(sums) == total
        assert sum(line.cost_nano for line in await billed_sums(scattered.database, filter_)) == cost


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
    for date in ("2026-11-20", "20261120", "2026-W47-5"):
        assert end_of(date, "to") == instant_of("2026-11-21", "to")
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


LAST_DAY = UsageFilter(from_unix_us=NOON - 24 * HOUR, to_unix_us=NOON + 1)
# By their end: minutes before noon, and the causes of the choices.
ENDED = {
    "req-a": (0, ["stop"]),
    "req-b": (0, ["length", "stop"]),
    "req-c": (1, ["stop", "error"]),
    "req-d": (20, ["cancelled"]),
    "req-e": (400, ["gateway_lost"]),
    "req-f": (1380, ["stop"]),
    "req-old": (1500, ["stop"]),
}


@pytest.fixture
async def used(parts: AccountingRig) -> AccountingRig:
    """The requests of ``ENDED``, two that run, and one of another tenant that ended at noon."""
    other = await parts.tenants.create("other")
    theirs = replace(parts.request("req-x"), tenant_id=other.tenant_id, model="other/m", key_id="key-x")
    for name, (minutes, causes) in (ENDED | {"req-x": (0, ["stop"])}).items():
        request = theirs if name == "req-x" else parts.request(name, num_choices=len(causes))
        await parts.ledger.open(request)
        await end(parts, name, causes, NOON - minutes * 60_000_000)
    await parts.ledger.open(replace(parts.request("req-r1"), opened_unix_us=NOON))
    await parts.ledger.open(replace(parts.request("req-r2"), opened_unix_us=NOON + 1, model="acme/story"))
    return parts


async def end(rig: AccountingRig, name: str, causes: Sequence[str], at_unix_us: int) -> None:
    usages = [ChoiceUsage(name, choice, 10, 4, 5, FinishCause(cause)) for choice, cause in enumerate(causes)]
    await rig.ledger.settle(name, usages)
    async with rig.database.write() as connection:
        for table in (opened, ledger):
            when = update(table).where(table.c.request_id == name)
            await connection.execute(when.values(settled_unix_us=at_unix_us))


async def listed(rig: AccountingRig, filter_: UsageFilter = LAST_DAY, status: Status | None = None) -> list[str]:
    """All pages of two."""
    names: list[str] = []
    after, has_more = None, True
    while has_more:
        page, has_more = await newest_requests(rig.database, filter_, status, 2, after)
        names += [each.request_id.removeprefix("req-") for each in page]
        after = page[-1] if page else None
    return names


async def test_request_that_ends_between_the_queries_of_a_page_is_listed_once(
    used: AccountingRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = request_query._ended

    async def after_an_end(*arguments: Any) -> Sequence[Row[Any]]:
        await end(used, "req-r1", ["stop"], NOON)
        return await ended(*arguments)

    monkeypatch.setattr(request_query, "_ended", after_an_end)
    page, has_more = await newest_requests(used.database, replace(LAST_DAY, tenant_id=used.acme.tenant_id), None, 7)
    assert [each.request_id.removeprefix("req-") for each in page] == ["r2", "r1", "b", "a", "c", "d", "e"]
    assert has_more


async def test_requests_that_run_come_first_then_the_newest_and_filters_select(used: AccountingRig) -> None:
    of_acme = replace(LAST_DAY, tenant_id=used.acme.tenant_id)
    later = replace(of_acme, from_unix_us=NOON - HOUR)
    cases: list[tuple[UsageFilter, Status | None, list[str]]] = [
        (of_acme, None, ["r2", "r1", "b", "a", "c", "d", "e", "f"]),
        (LAST_DAY, None, ["r2", "r1", "x", "b", "a", "c", "d", "e", "f"]),
        (LAST_DAY, "running", ["r2", "r1"]),
        (LAST_DAY, "ok", ["x", "b", "a", "f"]),
        (LAST_DAY, "error", ["c"]),
        (LAST_DAY, "cancelled", ["d"]),
        (LAST_DAY, "gateway_lost", ["e"]),
        (replace(LAST_DAY, model="acme/story"), None, ["r2"]),
        (replace(LAST_DAY, key_id="key-x"), None, ["x"]),
        (later, "ok", ["b", "a"]),
        (replace(later, from_unix_us=NOON + 2, to_unix_us=NOON + 2), "ok", []),
    ]
    for filter_, status, expected in cases:
        assert await listed(used, filter_, status) == expected, (filter_, status)


async def test_request_has_the_sums_of_its_choices(used: AccountingRig) -> None:
    request = await request_of(used.database, "req-b", used.acme.tenant_id)
    assert request is not None
    tokens = request.num_prompt_tokens, request.num_cached_prompt_tokens, request.num_output_tokens
    assert (request.status, request.causes, tokens) == ("ok", ("length", "stop"), (10, 4, 10))
    assert request.cost_nano == 6 * 100 + 4 * 25 + 10 * 400
    running = await request_of(used.database, "req-r1", None)
    assert running is not None
    assert (running.status, running.num_prompt_tokens, running.settled_unix_us) == ("running", 10, None)
    assert await request_of(used.database, "req-x", used.acme.tenant_id) is None, "another tenant's"
    assert await request_of(used.database, "req-nobody", None) is None


async def test_supplement_counts_and_leaves_the_status(used: AccountingRig) -> None:
    """The gateway that the sweep took for gone had delivered more."""
    await used.ledger.settle("req-e", [ChoiceUsage("req-e", 0, 10, 4, 9, FinishCause.STOP)])
    request = await request_of(used.database, "req-e", None)
    assert request is not None
    assert (request.status, request.causes, request.num_output_tokens) == ("gateway_lost", ("gateway_lost",), 9)


def test_every_cause_has_a_status() -> None:
    assert {*_FAILURES, FinishCause.STOP, FinishCause.LENGTH} == set(FinishCause)
