from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from tests.unit.gateway.http.conftest import RestRig
from torchrelay.gateway.core import ChoiceUsage, FinishCause


@pytest.fixture
async def billed(rig: RestRig) -> RestRig:
    await rig.parts.ledger.open(replace(rig.parts.request(), max_tokens=50_000))
    await rig.parts.ledger.settle("req-1", [ChoiceUsage("req-1", 0, 10, 4, 30_000, FinishCause.STOP)])
    return rig


COST = 6 * 100 + 4 * 25 + 30_000 * 400


async def test_usage_is_summed_with_its_cost(billed: RestRig) -> None:
    tokens = {"prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 30_000}
    expected = {**tokens, "requests": 1, "cost_nano": COST, "cost": "0.012000700"}
    for client, query in ((billed.acme, ""), (billed.admin, ""), (billed.admin, "&tenant=acme")):
        reply = (await client.get(f"/v1/usage?group_by=model{query}")).json()
        assert reply["data"] == [{"model": "acme/glossary", **expected}]
        assert reply["total"] == expected
    assert (await billed.acme.get("/v1/usage?model=glossary&key=key-1")).json()["data"] == [expected]
    assert (await billed.acme.get("/v1/usage?model=other")).json()["total"]["requests"] == 0
    assert (await billed.acme.get("/v1/usage?to=2026-01-01")).json()["total"]["requests"] == 0
    assert (await billed.admin.get("/v1/usage?model=glossary&tenant=acme")).json()["data"] == [expected]
    assert (await billed.admin.get("/v1/usage?model=acme/glossary")).json()["data"] == [expected]
    async with await billed.client_of("zoo") as zoo:
        assert (await zoo.get("/v1/usage")).json()["total"]["requests"] == 0
    refused = await billed.admin.get("/v1/usage?model=glossary")
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, "model", "invalid_request")
    assert "TENANT/NAME" in error["message"]


async def test_bill_of_this_month_has_its_lines_and_the_books_no_faults(billed: RestRig) -> None:
    period = datetime.now(UTC).strftime("%Y-%m")
    bill = (await billed.acme.get(f"/v1/bill?period={period}")).json()
    assert (bill["tenant"], bill["cost_nano"], bill["amount"], bill["currency"]) == ("acme", COST, "0.01", "USD")
    (line,) = bill["lines"]
    assert (line["model"], line["prompt_tokens"], line["completion_tokens"]) == ("acme/glossary", 10, 30_000)
    assert (line["amount"], line["output_nano"]) == ("0.01", 400)
    assert (await billed.admin.get(f"/v1/bill?period={period}&tenant=acme")).json() == bill
    assert (await billed.acme.get("/v1/bill?period=2020-01")).json()["lines"] == []
    counts = {"num_opened": 1, "num_settled": 1, "num_ledger_rows": 1, "cost_nano": COST}
    assert (await billed.admin.get("/v1/reconcile")).json() == {**counts, "faults": [], "ok": True}


async def test_prices_are_added_and_listed_with_their_intervals(rig: RestRig) -> None:
    row = {"model": "acme/glossary", "prompt_nano": 1, "cached_nano": 2, "output_nano": 3}
    first = (await rig.admin.put("/v1/prices", json=row)).json()
    second = (await rig.admin.put("/v1/prices", json=row | {"valid_from": "2999-01-01"})).json()
    listed = (await rig.admin.get("/v1/prices")).json()["data"]
    assert [(price["id"], price["model"], price["valid_to"]) for price in listed] == [
        ("price-default", None, None),
        (first["id"], "acme/glossary", "2999-01-01T00:00:00+00:00"),
        (second["id"], "acme/glossary", None),
    ]
    await rig.admin.put("/v1/prices", json=row | {"model": "zoo/secret"})
    of_acme = (await rig.acme.get("/v1/prices")).json()  # only its own models' prices and the default
    assert (of_acme["data"], of_acme["currency"]) == (listed, "USD")
    assert (await rig.acme.put("/v1/prices", json=row)).status_code == 403
    listed = (await rig.admin.get("/v1/prices")).json()
    for name, value in (
        *(("valid_from", "2020-01-01"), ("model", "glossary"), ("model", "")),
        *(("prompt_nano", False), ("cached_nano", True), ("output_nano", None)),
    ):
        wrong = await rig.admin.put("/v1/prices", json=row | {name: value})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, name)
    assert (await rig.admin.get("/v1/prices")).json() == listed
