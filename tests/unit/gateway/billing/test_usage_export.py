"""Exports of the ledger: numbers that resume, and the rules of FOCUS 1.2 for each charge."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import func, insert, select

from tests.unit.gateway.conftest import AccountingRig
from torchrelay.gateway.billing import usage_export
from torchrelay.gateway.billing.csv_table import csv_bytes
from torchrelay.gateway.billing.ledger import Ledger
from torchrelay.gateway.billing.usage_export import Format, encoded, exported_pages, header
from torchrelay.gateway.billing.usage_query import UsageFilter
from torchrelay.gateway.core import ChoiceUsage, FinishCause
from torchrelay.gateway.sql.tables import api_keys, ledger

NUM_REQUESTS = 30
END_OF_NOVEMBER = int(datetime.fromisoformat("2026-12-01T00:00:00Z").timestamp()) * 1_000_000
EVERY_MINUTES = 7


@pytest.fixture
async def filled(parts: AccountingRig) -> AccountingRig:
    """Requests around the end of a month, every third of another tenant, whose key has a hostile name."""
    other = await parts.tenants.create("other")
    key = {"key_id": "key-2", "tenant_id": other.tenant_id, "name": '=HYPERLINK("x")', "mac": "m", "created_unix_us": 1}
    async with parts.database.write() as connection:
        await connection.execute(insert(api_keys).values(key))
    for index in range(NUM_REQUESTS):
        request = parts.request(f"req-{index}")
        if index % 3 == 0:
            request = replace(request, tenant_id=other.tenant_id, key_id="key-2", model="other/m")
        at = END_OF_NOVEMBER + (index - NUM_REQUESTS // 2) * EVERY_MINUTES * 60_000_000 - 1
        usage = ChoiceUsage(request.request_id, 0, 10 * (index % 4), 4, index if index % 4 else 0, FinishCause.STOP)
        async with Ledger(parts.database, lambda at=at: at) as then:  # type: ignore[misc]
            await then.open(request)
            await then.settle(request.request_id, [usage])
    return parts


async def exported(
    rig: AccountingRig,
    format_: Format,
    filter_: UsageFilter | None = None,
    after: int = 0,
    limit: int | None = None,
    *,
    has_own_numbers: bool = False,
) -> str:
    pages = exported_pages(rig.database, filter_ or UsageFilter(), after, limit, has_own_numbers=has_own_numbers)
    return (header(format_) + b"".join([encoded(rows, format_) async for rows in pages])).decode()


async def test_export_resumes_after_any_number(filled: AccountingRig, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [json.loads(line) for line in (await exported(filled, "jsonl")).splitlines()]
    assert [line["id"] for line in whole] == list(range(1, NUM_REQUESTS + 1))
    assert whole[1]["settled"] == "2026-11-30T22:21:59.999999+00:00" and whole[1]["tenant"] == "acme"
    monkeypatch.setattr(usage_export, "_PAGE_ROWS", 4)
    monkeypatch.setattr(usage_export, "_RANGE", 10)
    of_acme, december = UsageFilter(tenant_id=filled.acme.tenant_id), UsageFilter(from_unix_us=END_OF_NOVEMBER)
    acme = [line for line in whole if line["tenant"] == "acme"]
    own = [line | {"id": number} for number, line in enumerate(acme, 1)]
    later = [line for line in own if line["settled"] >= "2026-12"]
    cases: list[tuple[UsageFilter, bool, list[Any]]] = [
        (UsageFilter(), False, whole),
        (december, False, [line for line in whole if line["settled"] >= "2026-12"]),
        (of_acme, False, acme),
        (of_acme, True, own),
        (replace(of_acme, from_unix_us=END_OF_NOVEMBER), True, later),
    ]
    for filter_, has_own_numbers, expected in cases:
        for limit in (1, 4, 7, None):
            resumed: list[object] = []
            after = 0
            while lines := (
                await exported(filled, "jsonl", filter_, after, limit, has_own_numbers=has_own_numbers)
            ).splitlines():
                assert limit is None or len(lines) <= limit
                resumed += map(json.loads, lines)
                after = json.loads(lines[-1])["id"]
            assert resumed == expected, (filter_, limit)
    lines = (await exported(filled, "csv", december)).splitlines()
    assert len(lines) == 1 + sum(line["settled"] >= "2026-12" for line in whole)
    assert lines[0].startswith("id,request,choice,supplement,tenant,key,model,")


async def test_charges_follow_the_rules_of_focus(filled: AccountingRig) -> None:
    """The requirements of version 1.2 for its mandatory columns and for the others that the export has."""
    charges = list(csv.DictReader(io.StringIO(await exported(filled, "focus"))))
    mandatory = {
        *("BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodEnd"),
        *("BillingPeriodStart", "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargePeriodEnd"),
        *("ChargePeriodStart", "ContractedCost", "EffectiveCost", "InvoiceIssuerName", "ListCost", "PricingQuantity"),
        *("PricingUnit", "ProviderName", "PublisherName", "ServiceCategory", "ServiceName"),
    }
    decimals = ("BilledCost", "ContractedCost", "EffectiveCost", "ListCost", "ListUnitPrice")
    quantities = ("PricingQuantity", "ConsumedQuantity")
    null = {"ChargeClass", "ResourceName"}  # no corrections; models have no display name
    sku_of: dict[str, str] = {}
    for charge in charges:
        assert mandatory <= charge.keys()
        own = [name for name in charge if name.startswith("x_")]
        assert list(charge)[-len(own) :] == own and all(re.fullmatch("(x_)?([A-Z][a-z]+)+", name) for name in charge)
        assert {name for name, value in charge.items() if not value.strip()} == null
        assert all(re.fullmatch(r"\d+(\.\d+)?", charge[name]) for name in (*decimals, *quantities))
        assert Decimal(charge["ListUnitPrice"]) * Decimal(charge["PricingQuantity"]) == Decimal(charge["ListCost"])
        assert len({charge[name] for name in decimals[:4]}) == 1
        assert all(
            re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", charge[f"{name}"]) for name in charge if "Period" in name
        )
        begin, end, month, next_month = (
            datetime.fromisoformat(charge[f"{of}Period{bound}"])
            for of in ("Charge", "Billing")
            for bound in ("Start", "End")
        )
        assert month <= begin < end <= next_month and end - begin == timedelta(seconds=1)
        assert (month.day, next_month.day, month.hour) == (1, 1, 0) and timedelta(
            28
        ) <= next_month - month <= timedelta(31)
        assert (charge["ChargeCategory"], charge["ChargeFrequency"]) == ("Usage", "Usage-Based")
        assert (charge["ServiceCategory"], charge["ServiceSubcategory"]) == ("AI and Machine Learning", "Generative AI")
        assert (charge["BillingCurrency"], charge["PricingUnit"], charge["ConsumedUnit"]) == ("USD", "Tokens", "Tokens")
        assert sku_of.setdefault(charge["SkuPriceId"], charge["SkuId"]) == charge["SkuId"], "one parent"
    assert {charge["BillingPeriodStart"][:7] for charge in charges} == {"2026-11", "2026-12"}
    assert {charge["SubAccountName"] for charge in charges} == {"key-1", '\'=HYPERLINK("x")'}
    async with filled.database.read() as connection:
        total = (await connection.execute(select(func.sum(ledger.c.cost_nano)))).scalar_one()
    assert sum(Decimal(charge["BilledCost"]) for charge in charges) * 10**9 == total


def test_no_text_is_a_formula() -> None:
    texts = ["=1+1", "+1", "-1", "@x", "\t=1", "a=1", "a,b", 'say "x"', "two\nlines"]
    rows = list(csv.reader(io.StringIO(csv_bytes([texts, [Decimal("-1.50"), -3, None, ""]]).decode())))
    assert rows == [[*(f"'{text}" for text in texts[:5]), *texts[5:]], ["-1.50", "-3", "", ""]]
