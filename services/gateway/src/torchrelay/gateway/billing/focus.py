"""Charges in FOCUS 1.2, the FinOps Open Cost and Usage Specification (focus.finops.org). Pure.

A ledger row has a charge for each kind of its tokens. The tenant is the billing account, the key the sub-account, and
the model the resource. The kind of tokens is the SKU, and its price in a row of the price list the SKU price.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

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
_SECOND_US = 1_000_000
_PROVIDER = "Torchrelay"


def charges_of(row: Any) -> list[list[Cell]]:
    """The charges of an exported row (usage_export.py), in the order of ``COLUMNS``; their costs sum to the row's."""
    kinds = (
        ("prompt", row.num_prompt_tokens - row.num_cached_prompt_tokens, row.prompt_nano),
        ("cached", row.num_cached_prompt_tokens, row.cached_nano),
        ("output", row.num_output_tokens, row.output_nano),
    )
    return [_charge(row, kind, num, price_nano) for kind, num, price_nano in kinds if num]


def _charge(row: Any, kind: str, num_tokens: int, price_nano: int) -> list[Cell]:
    second = row.settled_unix_us // _SECOND_US
    settled = datetime.fromtimestamp(second, UTC)
    month = datetime(settled.year, settled.month, 1, tzinfo=UTC)
    next_month = datetime(month.year + month.month // 12, month.month % 12 + 1, 1, tzinfo=UTC)
    cost = exact(num_tokens * price_nano)
    cells: dict[str, Cell] = {
        **dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), cost),
        "BillingAccountId": row.tenant_id,
        "BillingAccountName": row.tenant,
        "BillingCurrency": CURRENCY,
        "BillingPeriodStart": _instant(month),
        "BillingPeriodEnd": _instant(next_month),
        "ChargeCategory": "Usage",
        "ChargeDescription": f"{kind} tokens of {row.model}",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": _instant(settled),
        "ChargePeriodEnd": _instant(datetime.fromtimestamp(second + 1, UTC)),
        **dict.fromkeys(("ConsumedQuantity", "PricingQuantity"), num_tokens),
        **dict.fromkeys(("ConsumedUnit", "PricingUnit"), "Tokens"),
        **dict.fromkeys(("InvoiceIssuerName", "ProviderName", "PublisherName"), _PROVIDER),
        "ListUnitPrice": exact(price_nano),
        "ResourceId": row.model,
        "ResourceType": "Model",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "Inference",
        "ServiceSubcategory": "Generative AI",
        "SkuId": f"{kind}-tokens",
        "SkuPriceId": f"{row.price_id}/{kind}",
        "SubAccountId": row.key_id,
        "SubAccountName": row.key_name,
        "SubAccountType": "API key",
        "x_LedgerId": row.ledger_id,
        "x_RequestId": row.request_id,
    }
    return [cells.get(name) for name in COLUMNS]


def _instant(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
