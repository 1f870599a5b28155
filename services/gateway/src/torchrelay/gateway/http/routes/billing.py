"""/v1/usage, /v1/usage/export, /v1/invoices, /v1/adjustments, /v1/prices, /v1/reconcile."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from torchrelay.common.errors import InvalidRequest, ModelNotFound
from torchrelay.gateway.billing.bills import Adjustment, Invoice
from torchrelay.gateway.billing.invoice_formats import csv_invoice, html_invoice
from torchrelay.gateway.billing.money import CURRENCY, exact_amount
from torchrelay.gateway.billing.reconciliation import reconcile
from torchrelay.gateway.billing.usage_export import (
    MEDIA_TYPES,
    Format,
    NumberedRow,
    encoded,
    exported_pages,
    header,
)
from torchrelay.gateway.billing.usage_query import (
    GroupBy,
    UsageFilter,
    UsageSum,
    end_of,
    instant_of,
    total_of,
    usage_sums,
)
from torchrelay.gateway.core import Price, PriceService
from torchrelay.gateway.http.dependencies import Admin, Caller, Owner, ServicesOf, ledger_scope, tenant_of
from torchrelay.gateway.resource_names import is_name
from torchrelay.gateway.whole_number import WholeNumber


def content_of(*media_types: str) -> dict[int | str, dict[str, Any]]:
    """The description of an answer that is text of one of these types."""
    return {200: {"content": {each: {"schema": {}} for each in media_types}}}


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


class NewAdjustment(BaseModel):
    """A negative amount is a credit."""

    model_config = ConfigDict(extra="forbid", strict=True)
    tenant: str
    period: str
    amount_nano: Annotated[WholeNumber, Field(ge=-(2**53), le=2**53)]
    reason: str = Field(min_length=1, max_length=200)


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
    return {"object": "list", "data": [_sum(each, group_by) for each in sums], "total": _sum(total_of(sums), None)}


@router.get("/usage/export", response_class=Response, responses=content_of(*sorted(set(MEDIA_TYPES.values()))))
async def export(
    services: ServicesOf,
    caller: Caller,
    format_: Annotated[Format, Query(alias="format")] = "jsonl",
    after: Annotated[int, Query(ge=0, lt=2**63)] = 0,
    limit: Annotated[int | None, Query(ge=1)] = None,
    begin: Annotated[str | None, Query(alias="from")] = None,
    end: Annotated[str | None, Query(alias="to")] = None,
    tenant: str | None = None,
) -> Response:
    """Ledger rows numbered above ``after``, in order. To resume, name the last number received.

    The admin's numbers are those of the ledger, a tenant's count its own rows.
    """
    tenant_id, _ = await ledger_scope(services, caller, tenant, None)
    filter_ = UsageFilter(
        tenant_id=tenant_id,
        from_unix_us=None if begin is None else instant_of(begin, "from"),
        to_unix_us=None if end is None else end_of(end, "to"),
    )
    pages = exported_pages(services.database, filter_, after, limit, has_own_numbers=not caller.is_admin)

    async def page() -> Sequence[NumberedRow] | None:
        async with services.queries.turn(caller.tenant_id):  # between two pages others have theirs
            return await anext(pages, None)

    first = await page()  # its errors have their status; a later one breaks the answer off

    async def lines() -> AsyncIterator[bytes]:
        yield header(format_)
        rows = first
        async with aclosing(pages):
            while rows is not None:
                if rows:
                    yield encoded(rows, format_)
                rows = await page()

    return StreamingResponse(lines(), media_type=MEDIA_TYPES[format_])


@router.get(
    "/invoices/{period}", response_class=Response, responses=content_of("application/json", "text/csv", "text/html")
)
async def invoice(
    services: ServicesOf,
    caller: Caller,
    period: str,
    tenant: str | None = None,
    format_: Annotated[Literal["json", "csv", "html"], Query(alias="format")] = "json",
) -> Response:
    """A tenant's invoice of a month, or what it would be so far: a line per model and price, and per adjustment."""
    billed = await tenant_of(services, caller, tenant)
    async with services.queries.turn(caller.tenant_id):
        of_month = await services.invoices.invoice(billed.tenant_id, period)
    if format_ == "csv":
        return Response(csv_invoice(of_month), media_type="text/csv")
    if format_ == "html":
        policy = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return Response(html_invoice(of_month), media_type="text/html", headers=policy)
    return JSONResponse(_invoice(of_month))


@router.post("/invoices/{period}/close")
async def close(services: ServicesOf, admin: Owner, period: str, tenant: str | None = None) -> dict[str, Any]:
    """Numbers the invoices of a past month, of a tenant or of all; an invoice that is closed stays as it is."""
    closing = await services.tenants.list() if tenant is None else [await services.tenants.by_name(tenant)]
    async with services.queries.turn(admin.tenant_id):
        closed = await services.invoices.close([each.tenant_id for each in closing], period)
    return {"object": "list", "data": [_invoice(each) for each in closed]}


@router.post("/adjustments", status_code=201)
async def adjust(services: ServicesOf, _admin: Owner, body: NewAdjustment) -> dict[str, Any]:
    """Adds a charge or a credit to a month that is not closed, and to the balance."""
    adjusted = await services.tenants.by_name(body.tenant)
    return _adjustment(await services.invoices.adjust(adjusted.tenant_id, body.period, body.amount_nano, body.reason))


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
        result = await reconcile(services.database, services.registers())
    return {**asdict(result), "ok": not result.faults}


def _sum(usage_sum: UsageSum, group_by: GroupBy | None) -> dict[str, Any]:
    totals = asdict(usage_sum)
    group = totals.pop("group")
    return ({} if group_by is None else {group_by: group}) | totals | {"cost": exact_amount(usage_sum.cost_nano)}


def _invoice(invoice: Invoice) -> dict[str, Any]:
    lines = [asdict(line) | {"amount": str(line.amount), "currency": CURRENCY} for line in invoice.lines]
    return {
        "object": "invoice",
        "tenant": invoice.tenant,
        "period": invoice.period,
        "currency": CURRENCY,
        "number": invoice.number,
        "closed": None if invoice.closed_unix_us is None else _iso(invoice.closed_unix_us),
        "lines": lines,
        "adjustments": [_adjustment(each) for each in invoice.adjustments],
        "cost_nano": invoice.cost_nano,
        "amount": str(invoice.amount),
    }


def _adjustment(adjustment: Adjustment) -> dict[str, Any]:
    return {
        "id": adjustment.adjustment_id,
        "object": "adjustment",
        "period": adjustment.period,
        "amount_nano": adjustment.amount_nano,
        "amount": str(adjustment.amount),
        "reason": adjustment.reason,
        "created": _iso(adjustment.created_unix_us),
    }


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
