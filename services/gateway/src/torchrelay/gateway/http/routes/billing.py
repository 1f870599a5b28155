"""/v1/usage, /v1/bill, /v1/prices, /v1/reconcile."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from torchrelay.common.errors import InvalidRequest, ModelNotFound
from torchrelay.gateway.billing.bills import BilledSum, bill_amount, month_bounds
from torchrelay.gateway.billing.money import CURRENCY, exact_amount
from torchrelay.gateway.billing.reconciliation import reconcile
from torchrelay.gateway.billing.usage_query import (
    GroupBy,
    UsageFilter,
    UsageSum,
    billed_sums,
    end_of,
    instant_of,
    usage_sums,
)
from torchrelay.gateway.core import Price, PriceService
from torchrelay.gateway.http.dependencies import Admin, Caller, Owner, ServicesOf, ledger_scope, tenant_of
from torchrelay.gateway.resource_names import is_name
from torchrelay.gateway.whole_number import WholeNumber

router = APIRouter(prefix="/v1")
_MAX_NANO = 10**12  # a thousand dollars per token: certainly a mistake


class NewPrice(BaseModel):
    """Nano-dollars per token; without a model, the default price. ``service``: "batch" for the lines of batches."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str = Field(default="", min_length=1)  # an empty one would set the price of all models
    prompt_nano: WholeNumber = Field(ge=0, le=_MAX_NANO)
    cached_nano: WholeNumber = Field(ge=0, le=_MAX_NANO)
    output_nano: WholeNumber = Field(ge=0, le=_MAX_NANO)
    valid_from: str | None = None
    service: PriceService = ""


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
    """Usage settled in [from, to); a date as ``to`` includes its day."""
    tenant_id, model = await ledger_scope(services, caller, tenant, model)
    filter_ = UsageFilter(
        tenant_id=tenant_id,
        key_id=key,
        model=model,
        from_unix_us=None if begin is None else instant_of(begin, "from"),
        to_unix_us=None if end is None else end_of(end, "to"),
    )
    async with services.queries.turn(caller.tenant_id):
        sums = await usage_sums(services.database, filter_, group_by)
        total = sums if group_by is None else await usage_sums(services.database, filter_, None)
    return {"object": "list", "data": [_sum(each, group_by) for each in sums], "total": _sum(total[0], None)}


@router.get("/bill")
async def bill(
    services: ServicesOf, caller: Caller, period: str | None = None, tenant: str | None = None
) -> dict[str, Any]:
    """A tenant's monthly bill, by default of the current month so far: a line per model and price."""
    billed = await tenant_of(services, caller, tenant)
    period = period or datetime.now(UTC).strftime("%Y-%m")
    begin, end = month_bounds(period)
    filter_ = UsageFilter(tenant_id=billed.tenant_id, from_unix_us=begin, to_unix_us=end)
    async with services.queries.turn(caller.tenant_id):
        lines = await billed_sums(services.database, filter_)
    return {
        "object": "bill",
        "tenant": billed.name,
        "period": period,
        "currency": CURRENCY,
        "lines": [_bill_line(line) for line in lines],
        "cost_nano": sum(line.cost_nano for line in lines),
        "amount": str(bill_amount(lines)),
    }


@router.get("/prices")
async def prices(services: ServicesOf, caller: Caller) -> dict[str, Any]:
    """The price list by start of validity; for a tenant, the rows that can apply to its models."""
    async with services.lists.turn(caller.tenant_id):
        price_list = await services.prices.all()
    visible = [
        price for price in price_list.rows if caller.is_admin or price.model.partition("/")[0] in ("", caller.tenant)
    ]
    return {
        "object": "list",
        "currency": CURRENCY,
        "data": [_price(price, price_list.valid_until(price)) for price in visible],
    }


@router.put("/prices")
async def add_price(services: ServicesOf, admin: Owner, body: NewPrice) -> dict[str, Any]:
    """Adds a row to the price list; rows are never changed. An alias stands for its model."""
    tenant, _, model = body.model.partition("/")
    if body.model and not (is_name(tenant) and is_name(model)):
        raise InvalidRequest("model must be tenant/model, or omitted for the default price", field="model")
    if body.cached_nano > body.prompt_nano:  # a request reserves the price of a prompt that is not cached
        message = f"cached_nano must be at most prompt_nano ({body.prompt_nano}), not {body.cached_nano}"
        raise InvalidRequest(message, field="cached_nano")
    name, warning = body.model, {}
    if name:
        try:
            name = (await services.catalog.resolve(admin, name)).name
        except ModelNotFound:
            warning = {"warning": f"no model is named {name} yet; the price applies once there is one"}
    begin = None if body.valid_from is None else instant_of(body.valid_from, "valid_from")
    nano = body.prompt_nano, body.cached_nano, body.output_nano
    price = await services.prices.add(name, *nano, begin, body.service)
    return _price(price, None) | warning


@router.get("/reconcile")
async def reconciliation(services: ServicesOf, admin: Admin) -> dict[str, Any]:
    async with services.queries.turn(admin.tenant_id):
        result = await reconcile(services.database)
    return {**asdict(result), "ok": not result.faults}


def _sum(usage_sum: UsageSum, group_by: GroupBy | None) -> dict[str, Any]:
    totals = asdict(usage_sum)
    group = totals.pop("group")
    return ({} if group_by is None else {group_by: group}) | totals | {"cost": exact_amount(usage_sum.cost_nano)}


def _bill_line(line: BilledSum) -> dict[str, Any]:
    return asdict(line) | {"amount": str(line.amount), "currency": CURRENCY}


def _price(price: Price, until_unix_us: int | None) -> dict[str, Any]:
    return {
        "id": price.price_id,
        "object": "price",
        "model": price.model or None,
        "service": price.service,
        "prompt_nano": price.prompt_nano,
        "cached_nano": price.cached_nano,
        "output_nano": price.output_nano,
        "valid_from": _iso(price.valid_from_unix_us),
        "valid_to": None if until_unix_us is None else _iso(until_unix_us),
    }


def _iso(unix_us: int) -> str:
    return datetime.fromtimestamp(unix_us / 1e6, UTC).isoformat()
