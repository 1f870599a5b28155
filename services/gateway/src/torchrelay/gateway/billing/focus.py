"""Charges in FOCUS 1.2, the FinOps Open Cost and Usage Specification (focus.finops.org). Pure.

A ledger row has a charge for each kind of its tokens. The tenant is the billing account, the key the sub-account, and
the model the resource. The kind of tokens is the SKU, and its price in a row of the price list the SKU price.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from torchrelay.gateway.billing.bills import month_bounds
from torchrelay.gateway.billing.csv_table import Cell
from torchrelay.gateway.billing.money import CURRENCY, exact

COLUMNS = (
    "BilledCost",
    "BillingAccountId",
    "BillingAccountName",
    "BillingCurrency",
    "BillingPeriodEnd",
    "BillingPeriodStart",
    "ChargeCategory",
    "ChargeClass",
    "ChargeDescription",
    "ChargeFrequency",
    "ChargePeriodEnd",
    "ChargePeriodStart",
    "ConsumedQuantity",
    "ConsumedUnit",
    "ContractedCost",
    "EffectiveCost",
    "InvoiceIssuerName",
    "ListCost",
    "ListUnitPrice",
    "PricingQuantity",
    "PricingUnit",
    "ProviderName",
    "PublisherName",
    "ResourceId",
    "ResourceName",
    "ResourceType",
    "ServiceCategory",
    "ServiceName",
    "ServiceSubcategory",
    "SkuId",
    "SkuPriceId",
    "SubAccountId",
    "SubAccountName",
    "SubAccountType",
    "x_LedgerId",
    "x_RequestId",
)
_DAY_S = 86_400


_CONSTANT: dict[str, Cell] = {
    "BillingCurrency": CURRENCY,
    "ChargeCategory": "Usage",
    "ChargeFrequency": "Usage-Based",
    **dict.fromkeys(("ConsumedUnit", "PricingUnit"), "Tokens"),
    **dict.fromkeys(("InvoiceIssuerName", "ProviderName", "PublisherName"), "Torchrelay"),
    "ResourceType": "Model",
    "ServiceCategory": "AI and Machine Learning",
    "ServiceName": "Inference",
    "ServiceSubcategory": "Generative AI",
    "SubAccountType": "API key",
}


def charges_of(number: int, row: Any) -> list[list[Cell]]:
    """The charges of a numbered row (usage_export.py), in the order of ``COLUMNS``; their costs sum to the row's."""
    second = row.settled_unix_us // 1_000_000
    shared = _CONSTANT | _billing_period(second // _DAY_S)
    shared |= {
        "BillingAccountId": row.tenant_id,
        "BillingAccountName": row.tenant,
        "ChargePeriodStart": _instant(second),
        "ChargePeriodEnd": _instant(second + 1),
        "ResourceId": row.model,
        "SubAccountId": row.key_id,
        "SubAccountName": row.key_name,
        "x_LedgerId": number,
        "x_RequestId": row.request_id,
    }
    kinds = (
        ("prompt", row.num_prompt_tokens - row.num_cached_prompt_tokens, row.prompt_nano),
        ("cached", row.num_cached_prompt_tokens, row.cached_nano),
        ("output", row.num_output_tokens, row.output_nano),
    )
    return [_charge(shared, row, *kind) for kind in kinds if kind[1]]


def _charge(shared: dict[str, Cell], row: Any, kind: str, num_tokens: int, price_nano: int) -> list[Cell]:
    cost = exact(num_tokens * price_nano)
    cells = shared | {
        **dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), cost),
        "ChargeDescription": f"{kind} tokens of {row.model}",
        "ConsumedQuantity": num_tokens,
        "PricingQuantity": num_tokens,
        "ListUnitPrice": exact(price_nano),
        "SkuId": f"{kind}-tokens",
        "SkuPriceId": f"{row.price_id}/{kind}",
    }
    return [*map(cells.get, COLUMNS)]


@lru_cache(64)
def _billing_period(day: int) -> dict[str, Cell]:
    """The month of a day since 1970."""
    month = datetime.fromtimestamp(day * _DAY_S, UTC).replace(day=1)
    begin, end = month_bounds(f"{month:%Y-%m}")
    return {"BillingPeriodStart": _instant(begin // 1_000_000), "BillingPeriodEnd": _instant(end // 1_000_000)}


@lru_cache(64)
def _instant(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
