"""Usage, bills and prices, and the tenants and keys that they are of."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from tests.unit.gateway.http.conftest import RestRig, client
from tests.unit.gateway.http.routes.test_uploads import published
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
    for caller, query in ((billed.acme, ""), (billed.admin, ""), (billed.admin, "&tenant=acme")):
        reply = (await caller.get(f"/v1/usage?group_by=model{query}")).json()
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


async def test_export_has_the_rows_of_the_caller(billed: RestRig) -> None:
    reply = await billed.acme.get("/v1/usage/export")
    line = json.loads(reply.text)
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert (line["id"], line["tenant"], line["cost_nano"], line["cost"]) == (1, "acme", COST, "0.012000700")
    for query in ("format=jsonl", "tenant=acme", "from=2026-01-01&limit=5"):
        assert (await billed.admin.get(f"/v1/usage/export?{query}")).text == reply.text
    for query in ("after=1", "to=2026-01-01"):
        assert (await billed.acme.get(f"/v1/usage/export?{query}")).text == ""
    focus = await billed.acme.get("/v1/usage/export?format=focus")
    assert focus.headers["content-type"].startswith("text/csv") and len(focus.text.splitlines()) == 4
    async with await billed.client_of("zoo") as zoo:
        assert len((await zoo.get("/v1/usage/export?format=csv")).text.splitlines()) == 1
        tenant = await billed.parts.tenants.by_name("zoo")
        await billed.parts.ledger.open(replace(billed.parts.request("req-2"), tenant_id=tenant.tenant_id))
        await billed.parts.ledger.settle("req-2", [ChoiceUsage("req-2", 0, 10, 4, 3, FinishCause.STOP)])
        shown = [json.loads((await each.get("/v1/usage/export?tenant=zoo")).text)["id"] for each in (zoo, billed.admin)]
        assert shown == [1, 2], "a tenant's numbers count its own rows"
        assert (await zoo.get("/v1/usage/export?tenant=acme")).status_code == 403
    for query, field in (("format=xml", "format"), ("after=-1", "after"), ("limit=0", "limit"), ("to=soon", "to")):
        refused = await billed.acme.get(f"/v1/usage/export?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


async def test_invoice_of_this_month_has_its_lines_and_the_books_no_faults(billed: RestRig) -> None:
    period = datetime.now(UTC).strftime("%Y-%m")
    invoice = (await billed.acme.get(f"/v1/invoices/{period}")).json()
    assert (invoice["tenant"], invoice["cost_nano"], invoice["amount"]) == ("acme", COST, "0.01")
    assert (invoice["number"], invoice["closed"], invoice["currency"]) == (None, None, "USD")
    (line,) = invoice["lines"]
    assert (line["model"], line["prompt_tokens"], line["completion_tokens"]) == ("acme/glossary", 10, 30_000)
    assert (line["amount"], line["output_nano"]) == ("0.01", 400)
    assert (await billed.admin.get(f"/v1/invoices/{period}?tenant=acme")).json() == invoice
    assert (await billed.acme.get("/v1/invoices/2020-01")).json()["lines"] == []
    early = await billed.admin.post(f"/v1/invoices/{period}/close")
    assert (early.status_code, early.json()["error"]["param"]) == (400, "period")
    books = (await billed.admin.get("/v1/reconcile")).json()
    counts = {"num_opened": 1, "num_settled": 1, "num_ledger_rows": 1, "cost_nano": COST, "num_in_registers": None}
    assert books == {**counts, "adjusted_nano": 0, "difference_nano": 0, "faults": [], "ok": True}


async def test_adjusted_month_is_closed_once_and_printed(billed: RestRig) -> None:
    adjustment = {"tenant": "acme", "period": "2026-01", "amount_nano": 2_500_000_000, "reason": "=<b>set-up</b>"}
    made = await billed.admin.post("/v1/adjustments", json=adjustment)
    assert (made.status_code, made.json()["amount"]) == (201, "2.50")
    adjustment |= {"amount_nano": -500_000_000, "reason": "credit"}
    assert (await billed.admin.post("/v1/adjustments", json=adjustment)).status_code == 201
    closed = (await billed.admin.post("/v1/invoices/2026-01/close")).json()["data"]
    assert [(each["tenant"], each["number"], each["amount"]) for each in closed] == [("acme", 1, "2.00")]
    assert (await billed.admin.post("/v1/invoices/2026-01/close?tenant=acme")).json()["data"] == closed
    assert (await billed.acme.get("/v1/invoices/2026-01")).json() == closed[0]
    late = await billed.admin.post("/v1/adjustments", json=adjustment)
    assert (late.status_code, late.json()["error"]["param"]) == (409, "period")
    page = await billed.acme.get("/v1/invoices/2026-01?format=html")
    assert "Invoice 1" in page.text and "=&lt;b&gt;set-up&lt;/b&gt;" in page.text and "<b>" not in page.text
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    *_, charge, credit, total = csv.reader((await billed.acme.get("/v1/invoices/2026-01?format=csv")).text.splitlines())
    assert (charge[0], charge[6], credit[6], total[:1] + total[5:7]) == (
        "'=<b>set-up</b>",
        "2.50",
        "-0.50",
        ["Total", "2.000000000", "2.00"],
    )
    for wrong, field in (
        ({"period": "2026-13"}, "period"),
        ({"period": "2999-01"}, "period"),
        ({"reason": ""}, "reason"),
        ({"amount_nano": -3_000_000_000, "period": "2026-02"}, "amount_nano"),
    ):
        refused = await billed.admin.post("/v1/adjustments", json=adjustment | wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    books = (await billed.admin.get("/v1/reconcile")).json()
    assert (books["adjusted_nano"], books["faults"]) == (2_000_000_000, [])


async def test_prices_are_added_and_listed_with_their_intervals(rig: RestRig) -> None:
    row = {"model": "acme/glossary", "prompt_nano": 2, "cached_nano": 1, "output_nano": 3}
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
        *(("valid_from", "2020-01-01"), ("model", "glossary"), ("model", ""), ("model", "acme/nothing here")),
        ("cached_nano", 3),  # more than a prompt that is not cached, whose price a request reserves
        *(("prompt_nano", False), ("cached_nano", True), ("output_nano", None)),
    ):
        wrong = await rig.admin.put("/v1/prices", json=row | {name: value})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, name)
    assert (await rig.admin.get("/v1/prices")).json() == listed


async def test_alias_stands_for_its_model_in_prices_and_usage(billed: RestRig) -> None:
    await published(billed.acme)
    await billed.acme.put("/v1/models/glossary/aliases", json={"aliases": ["gpt-4o"]})
    row = {"model": "acme/gpt-4o", "prompt_nano": 2, "cached_nano": 1, "output_nano": 3}
    added = (await billed.admin.put("/v1/prices", json=row)).json()
    assert added["model"] == "acme/glossary" and "warning" not in added
    assert (
        "no model is named" in (await billed.admin.put("/v1/prices", json=row | {"model": "acme/x"})).json()["warning"]
    )
    assert (await billed.acme.get("/v1/usage?model=gpt-4o")).json()["total"]["requests"] == 1


async def test_limited_key_makes_no_keys_and_a_tenant_has_a_thousand(
    rig: RestRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each key has a rate of its own: a limited one that made others would have no limit."""
    limited = (await rig.acme.post("/v1/keys", json={"requests_per_minute": 5})).json()
    async with client(rig.url, limited["key"]) as caller:
        assert (await caller.post("/v1/keys", json={})).status_code == 403
    monkeypatch.setattr("torchrelay.gateway.auth.api_keys.MAX_KEYS", 3)
    assert (await rig.acme.post("/v1/keys", json={})).status_code == 201
    full = await rig.acme.post("/v1/keys", json={})
    assert full.status_code == 409 and "has 3 keys" in full.json()["error"]["message"]
    assert (await rig.acme.delete(f"/v1/keys/{limited['id']}")).status_code == 204
    assert (await rig.acme.post("/v1/keys", json={})).status_code == 201


async def test_admin_creates_tenant_and_key_and_tenant_more_keys(rig: RestRig) -> None:
    wanted = {"name": "zoo", "storage_quota_bytes": 10, "budget_nano": 5}
    made = await rig.admin.post("/v1/tenants", json=wanted)
    assert made.status_code == 201 and wanted.items() <= made.json().items()
    assert [tenant["name"] for tenant in (await rig.admin.get("/v1/tenants")).json()["data"]] == ["acme", "zoo"]
    key = (await rig.admin.post("/v1/keys", json={"tenant": "zoo", "name": "ci"})).json()
    assert key["tenant"] == "zoo"
    async with client(rig.url, key["key"]) as zoo:
        second = (await zoo.post("/v1/keys", json={"requests_per_minute": 5})).json()
        assert (second["tenant"], second["requests_per_minute"]) == ("zoo", 5)
        listed = (await zoo.get("/v1/keys")).json()["data"]
        assert [shown["id"] for shown in listed] == [key["id"], second["id"]]
        assert all("key" not in shown and "mac" not in shown for shown in listed)
        assert (await zoo.delete(f"/v1/keys/{second['id']}")).status_code == 204
        async with client(rig.url, second["key"]) as revoked:
            assert (await revoked.get("/v1/models")).status_code == 401


async def test_duplicate_invalid_and_missing_tenants_are_refused(rig: RestRig) -> None:
    assert (await rig.admin.post("/v1/tenants", json={"name": "acme"})).status_code == 409
    for name in ("", "A", "a/b", "../x", "x" * 65, "-a"):
        reply = await rig.admin.post("/v1/tenants", json={"name": name})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "name")
    reply = await rig.admin.post("/v1/keys", json={})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tenant"), "a key is of a tenant"
    assert (await rig.admin.post("/v1/keys", json={"tenant": "absent"})).status_code == 404


async def test_keys_of_another_tenant_are_out_of_reach(rig: RestRig) -> None:
    async with await rig.client_of("zoo") as zoo:
        own = (await zoo.get("/v1/keys")).json()["data"][0]["id"]
        assert (await rig.acme.delete(f"/v1/keys/{own}")).status_code == 404
        for tenant in ("zoo", "absent"):  # the same answer, whether or not it exists
            reply = await rig.acme.post("/v1/keys", json={"tenant": tenant})
            assert (reply.status_code, reply.json()["error"]["message"]) == (403, "this key belongs to another tenant")
        assert (await zoo.get("/v1/keys")).status_code == 200


async def test_tenant_limits_change_separately(rig: RestRig) -> None:
    await rig.admin.post("/v1/tenants", json={"name": "zoo", "storage_quota_bytes": 10, "budget_nano": 5})
    raised = (await rig.admin.patch("/v1/tenants/zoo", json={"budget_nano": 9})).json()
    assert (raised["budget_nano"], raised["storage_quota_bytes"]) == (9, 10)
    freed = (await rig.admin.patch("/v1/tenants/zoo", json={"storage_quota_bytes": None})).json()
    assert (freed["budget_nano"], freed["storage_quota_bytes"]) == (9, None)
    assert (await rig.admin.patch("/v1/tenants/zoo", json={})).json() == freed
    assert (await rig.admin.patch("/v1/tenants/absent", json={"budget_nano": 9})).status_code == 404
    for value, said in ((-1, "must be at least 0, not -1"), ("much", "must be an integer, not 'much'")):
        wrong = await rig.admin.patch("/v1/tenants/zoo", json={"budget_nano": value})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "budget_nano")
        assert wrong.json()["error"]["message"] == f"budget_nano {said}"
    assert (await rig.acme.patch("/v1/tenants/acme", json={"budget_nano": 9})).status_code == 403


async def test_service_classes_are_stored_and_listed(rig: RestRig) -> None:
    made = (await rig.admin.post("/v1/tenants", json={"name": "zoo", "service_class": "batch"})).json()
    assert made["service_class"] == "batch"
    assert (await rig.admin.patch("/v1/tenants/zoo", json={"budget_nano": 9})).json()["service_class"] == "batch"
    assert (await rig.admin.patch("/v1/tenants/zoo", json={"service_class": None})).json()["service_class"] is None
    assert (await rig.acme.patch("/v1/tenants/acme", json={"service_class": "batch"})).status_code == 403
    shown = {each["name"]: each["service_class"] for each in (await rig.admin.get("/v1/tenants")).json()["data"]}
    assert shown == {"acme": None, "zoo": None}
    key = (await rig.acme.post("/v1/keys", json={"name": "nightly", "service_class": "batch"})).json()
    assert key["service_class"] == "batch"
    listed = (await rig.acme.get("/v1/keys")).json()["data"]
    assert {each["name"]: each["service_class"] for each in listed} == {"first": None, "nightly": "batch"}
    asked = rig.acme.post("/v1/keys", json={"service_class": "flex"})
    for reply in (await asked, await rig.admin.patch("/v1/tenants/zoo", json={"service_class": "flex"})):
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "service_class")
        message = "service_class must be 'interactive', 'standard' or 'batch', not 'flex'"
        assert reply.json()["error"]["message"] == message
