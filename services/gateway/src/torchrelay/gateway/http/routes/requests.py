"""/v1/requests: the requests of the ledger, the newest first; prompts and answers are not kept."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import InvalidRequest, NotFound
from torchrelay.gateway.billing.money import exact_amount
from torchrelay.gateway.billing.request_query import LedgerRequest, Status, as_listed, newest_requests, request_of
from torchrelay.gateway.billing.usage_query import UsageFilter, end_of, instant_of
from torchrelay.gateway.http.dependencies import Caller, ServicesOf, ledger_scope

router = APIRouter(prefix="/v1/requests")
MAX_LISTED = 500
_DAY_US = 86_400_000_000


@router.get("")
async def all_requests(
    services: ServicesOf,
    caller: Caller,
    model: str | None = None,
    status: Status | None = None,
    key: str | None = None,
    tenant: str | None = None,
    begin: Annotated[str | None, Query(alias="from")] = None,
    end: Annotated[str | None, Query(alias="to")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 50,
    after_id: str | None = None,
    after_status: Status | None = None,
) -> dict[str, Any]:
    """Requests that run, then requests that ended in [from, to), by default in the last day, the newest first."""
    tenant_id, model = await ledger_scope(services, caller, tenant, model)
    to_unix_us = None if end is None else end_of(end, "to")
    day_ago = (now_unix_us() if to_unix_us is None else to_unix_us) - _DAY_US
    from_unix_us = day_ago if begin is None else instant_of(begin, "from")
    filter_ = UsageFilter(tenant_id, key, model, from_unix_us, to_unix_us)
    async with services.queries.turn(caller.tenant_id):
        after = None if after_id is None else await request_of(services.database, after_id, tenant_id)
        if after is None and after_id is not None:
            message = f"after_id must be the id of a listed request, not {after_id[:200]!r}"
            raise InvalidRequest(message, field="after_id")
        if after is not None:
            after = as_listed(after, after_status or status or after.status)
        listed, has_more = await newest_requests(services.database, filter_, status, limit, after)
    return {"object": "list", "data": [shown(each) for each in listed], "has_more": has_more}


@router.get("/{request_id}")
async def one_request(services: ServicesOf, caller: Caller, request_id: str) -> dict[str, Any]:
    request = await request_of(services.database, request_id, None if caller.is_admin else caller.tenant_id)
    if request is None:
        raise NotFound(f"request {request_id!r} not found", field="request_id")
    return shown(request)


def shown(request: LedgerRequest) -> dict[str, Any]:
    """A request in JSON; the names of its figures are those of the usage."""
    return {
        "id": request.request_id,
        "object": "request",
        "model": request.model,
        "key": request.key_id,
        "status": request.status,
        "causes": request.causes,
        "prompt_tokens": request.num_prompt_tokens,
        "cached_tokens": request.num_cached_prompt_tokens,
        "completion_tokens": request.num_output_tokens,
        "cost_nano": request.cost_nano,
        "cost": exact_amount(request.cost_nano),
        "opened_unix_us": request.opened_unix_us,
        "ended_unix_us": request.settled_unix_us,
    }
