from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Row, update

from tests.unit.gateway.conftest import AccountingRig
from torchrelay.gateway.billing import request_query
from torchrelay.gateway.billing.request_query import _FAILURES, Status, newest_requests, request_of
from torchrelay.gateway.billing.usage_query import UsageFilter, instant_of
from torchrelay.gateway.core import ChoiceUsage, FinishCause
from torchrelay.gateway.sql.tables import ledger, opened

HOUR = 3_600_000_000
NOON = instant_of("2026-11-20T12:00:00Z", "from")
DAY = UsageFilter(from_unix_us=NOON - 24 * HOUR, to_unix_us=NOON + 1)
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


async def listed(rig: AccountingRig, filter_: UsageFilter = DAY, status: Status | None = None) -> list[str]:
    """All pages of two."""
    names: list[str] = []
    after, has_more = None, True
    while has_more:
        page, has_more = await newest_requests(rig.database, filter_, status, 2, after)
        names += [each.request_id.removeprefix("req-") for each in page]
        after = page[-1] if page else None
    return names


async def test_those_that_run_come_first_then_the_newest(used: AccountingRig) -> None:
    of_acme = replace(DAY, tenant_id=used.acme.tenant_id)
    assert await listed(used, of_acme) == ["r2", "r1", "b", "a", "c", "d", "e", "f"]
    assert await listed(used) == ["r2", "r1", "x", "b", "a", "c", "d", "e", "f"]


async def test_request_that_ends_between_the_queries_of_a_page_is_listed_once(
    used: AccountingRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = request_query._ended

    async def after_an_end(*arguments: Any) -> Sequence[Row[Any]]:
        await end(used, "req-r1", ["stop"], NOON)
        return await ended(*arguments)

    monkeypatch.setattr(request_query, "_ended", after_an_end)
    page, has_more = await newest_requests(used.database, replace(DAY, tenant_id=used.acme.tenant_id), None, 7)
    assert [each.request_id.removeprefix("req-") for each in page] == ["r2", "r1", "b", "a", "c", "d", "e"]
    assert has_more


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("running", ["r2", "r1"]),
        ("ok", ["x", "b", "a", "f"]),
        ("error", ["c"]),
        ("cancelled", ["d"]),
        ("gateway_lost", ["e"]),
    ],
)
async def test_requests_of_a_status(used: AccountingRig, status: Status, expected: list[str]) -> None:
    assert await listed(used, status=status) == expected


async def test_model_key_and_period_select(used: AccountingRig) -> None:
    assert await listed(used, replace(DAY, model="acme/story")) == ["r2"]
    assert await listed(used, replace(DAY, key_id="key-x")) == ["x"]
    later = replace(DAY, tenant_id=used.acme.tenant_id, from_unix_us=NOON - HOUR)
    assert await listed(used, later, "ok") == ["b", "a"]
    assert await listed(used, replace(later, from_unix_us=NOON + 2, to_unix_us=NOON + 2), "ok") == []


async def test_request_has_the_sums_of_its_choices(used: AccountingRig) -> None:
    request = await request_of(used.database, "req-b", used.acme.tenant_id)
    assert request is not None
    tokens = request.num_prompt_tokens, request.num_cached_prompt_tokens, request.num_output_tokens
    assert (request.status, request.causes, tokens) == ("ok", ("length", "stop"), (10, 4, 10))
    assert request.cost_nano == 6 * 100 + 4 * 25 + 10 * 400
    running = await request_of(used.database, "req-r1", None)
    assert running is not None
    assert (running.status, running.num_prompt_tokens, running.settled_unix_us) == ("running", 10, None)


async def test_request_of_another_tenant_is_unknown(used: AccountingRig) -> None:
    assert await request_of(used.database, "req-x", used.acme.tenant_id) is None
    assert await request_of(used.database, "req-nobody", None) is None


async def test_supplement_counts_and_leaves_the_status(used: AccountingRig) -> None:
    """The gateway that the sweep took for gone had delivered more."""
    await used.ledger.settle("req-e", [ChoiceUsage("req-e", 0, 10, 4, 9, FinishCause.STOP)])
    request = await request_of(used.database, "req-e", None)
    assert request is not None
    assert (request.status, request.causes, request.num_output_tokens) == ("gateway_lost", ("gateway_lost",), 9)


def test_every_cause_has_a_status() -> None:
    assert {*_FAILURES, FinishCause.STOP, FinishCause.LENGTH} == set(FinishCause)
