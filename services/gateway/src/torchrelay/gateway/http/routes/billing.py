"""/v1/usage, /v1/bill, /v1/prices, /v1/reconcile: what was used, what it costs, and whether the books are right."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.billing.bills import BillLine, bill_of, month_bounds
from torchrelay.gateway.billing.money import CURRENCY, exact_amount
from torchrelay.gateway.billing.price_list import valid_until
from torchrelay.gateway.billing.reconciliation import reconcile
from torchrelay.gateway.billing.usage_query import GroupBy, UsageFilter, UsageSum, billed_sums, instant_of, usage_sums
from torchrelay.gateway.core import Price
from torchrelay.gateway.http.dependencies import Admin, Caller, ServicesOf, tenant_of

router = APIRouter(prefix="/v1")
_MAX_NANO = 10**12  # a thousand dollars a token: a slip of the pen


class NewPrice(BaseModel):
    """Nano-dollars per token; without a model, the default of all."""

    model_config = ConfigDict(extra="forbid")
    model: str = ""
    prompt_nano: int = Field(ge=0, le=_MAX_NANO)
    cached_nano: int = Field(ge=0, le=_MAX_NANO)
    output_nano: int = Field(ge=0, le=_MAX_NANO)
    valid_from: str | None = None


@router.get("/usage")
async def usage(
    services: ServicesOf,
    caller: Caller,
    begin: Annotated[str | None, Query(alias="from")] = None,
    end: Annotated[str | None, Query(alias="to")] = None,
    key: str | None = None,
    model: str | None = None,
    tenant: str | None = None,
    group_by: GroupBy | None = None,
) -> dict[str, Any]:
    """Settled usage in [from, to), by the time of settlement."""
    is_of_all = caller.is_admin and tenant is None
    tenant_id = None if is_of_all else (await tenant_of(services, caller, tenant)).tenant_id
    if model is not None and "/" not in model:
        if is_of_all:
            raise InvalidRequest(
                "models are named per tenant: write TENANT/NAME, or name the tenant too", field="model"
            )
        model = f"{tenant or caller.tenant}/{model}"
    wanted = UsageFilter(
        tenant_id=tenant_id,
        key_id=key,
        model=model,
        from_unix_us=None if begin is None else instant_of(begin, "from"),
        to_unix_us=None if end is None else instant_of(end, "to"),
    )
    sums = await usage_sums(services.database, wanted, group_by)
    total = sums if group_by is None else await usage_sums(services.database, wanted, None)
    return {"object": "list", "data": [_sum(one, group_by) for one in sums], "total": _sum(total[0], None)}


@router.get("/bill")
async def bill(
    services: ServicesOf, caller: Caller, period: str | None = None, tenant: str | None = None
) -> dict[str, Any]:
    """A month's bill of a tenant, by default this month's so far: a line per model and price."""
    of = await tenant_of(services, caller, tenant)
    period = period or datetime.now(UTC).strftime("%Y-%m")
    begin, end = month_bounds(period)
    wanted = UsageFilter(tenant_id=of.tenant_id, from_unix_us=begin, to_unix_us=end)
    made = bill_of(period, await billed_sums(services.database, wanted))
    return {
        "object": "bill",
        "tenant": of.name,
        "period": period,
        "currency": CURRENCY,
        "lines": [_bill_line(line) for line in made.lines],
        "cost_nano": made.cost_nano,
        "amount": str(made.amount),
    }


@router.get("/prices")
async def prices(services: ServicesOf, caller: Caller) -> dict[str, Any]:
    """The price list by the time each row begins; for a tenant the rows that can apply to its models."""
    rows = await services.prices.all()
    seen = [price for price in rows if caller.is_admin or price.model.partition("/")[0] in ("", caller.tenant)]
    return {
        "object": "list",
        "currency": CURRENCY,
        "data": [_price(price, valid_until(rows, price)) for price in seen],
    }


@router.put("/prices")
async def add_price(services: ServicesOf, _admin: Admin, wanted: NewPrice) -> dict[str, Any]:
    """Begins a new row of the price list; rows are never changed."""
    if wanted.model and wanted.model.count("/") != 1:
        raise InvalidRequest("name the model as tenant/model, or leave it out for the default", field="model")
    begin = None if wanted.valid_from is None else instant_of(wanted.valid_from, "valid_from")
    price = await services.prices.add(wanted.model, wanted.prompt_nano, wanted.cached_nano, wanted.output_nano, begin)
    return _price(price, None)


@router.get("/reconcile")
async def reconciliation(services: ServicesOf, _admin: Admin) -> dict[str, Any]:
    found = await reconcile(services.database)
    return {**asdict(found), "ok": not found.faults}


def _sum(one: UsageSum, group_by: GroupBy | None) -> dict[str, Any]:
    named = {} if group_by is None else {group_by: one.group}
    return named | {
        "prompt_tokens": one.prompt_tokens,
        "cached_tokens": one.cached_tokens,
        "completion_tokens": one.completion_tokens,
        "requests": one.requests,
        "cost_nano": one.cost_nano,
        "cost": exact_amount(one.cost_nano),
    }


def _bill_line(line: BillLine) -> dict[str, Any]:
    return asdict(line.billed) | {"amount": str(line.amount), "currency": CURRENCY}


def _price(price: Price, until_unix_us: int | None) -> dict[str, Any]:
    return {
        "id": price.price_id,
        "object": "price",
        "model": price.model or None,
        "prompt_nano": price.prompt_nano,
        "cached_nano": price.cached_nano,
        "output_nano": price.output_nano,
        "valid_from": _iso(price.valid_from_unix_us),
        "valid_to": None if until_unix_us is None else _iso(until_unix_us),
    }


def _iso(unix_us: int) -> str:
    return datetime.fromtimestamp(unix_us / 1e6, UTC).isoformat()
