"""/v1/webhooks: where events are sent. Operators name the addresses, since the platform's own machines call them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.grants import is_safe_url
from torchrelay.gateway.http.dependencies import Admin, Owner, ServicesOf
from torchrelay.gateway.sql.event_outbox import EVENT_TYPES, EventType
from torchrelay.gateway.webhooks.webhooks import Webhook

router = APIRouter(prefix="/v1/webhooks")


class NewWebhook(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    url: str = Field(max_length=2000)
    tenant: str | None = None
    types: Annotated[list[EventType], Field(min_length=1)] = [*EVENT_TYPES]


@router.post("", status_code=201)
async def create(services: ServicesOf, _admin: Owner, body: NewWebhook) -> dict[str, Any]:
    """The answer has the secret of the signatures, which is shown only now."""
    if not is_safe_url(body.url):
        raise InvalidRequest(
            f"url must begin with https:// (or http:// on loopback), not {body.url[:100]!r}", field="url"
        )
    tenant_id = None if body.tenant is None else (await services.tenants.by_name(body.tenant)).tenant_id
    webhook = await services.webhooks.create(tenant_id, body.url, body.types)
    return {**_shown(webhook, body.tenant), "secret": webhook.secret}


@router.get("")
async def all_webhooks(services: ServicesOf, _admin: Admin) -> dict[str, Any]:
    names = {tenant.tenant_id: tenant.name for tenant in await services.tenants.list()}
    listed = await services.webhooks.list()
    return {"object": "list", "data": [_shown(each, names.get(each.tenant_id or "")) for each in listed]}


@router.delete("/{webhook_id}", status_code=204)
async def delete(services: ServicesOf, _admin: Owner, webhook_id: str) -> None:
    await services.webhooks.delete(webhook_id)


def _shown(webhook: Webhook, tenant: str | None) -> dict[str, Any]:
    next_try = datetime.fromtimestamp(webhook.next_unix_us / 1e6, UTC).isoformat(timespec="seconds")
    return {
        "id": webhook.webhook_id,
        "object": "webhook",
        "url": webhook.url,
        "tenant": tenant,
        "types": sorted(webhook.types),
        "created": webhook.created_unix_us // 1_000_000,
        "failures": webhook.num_failures,
        "last_error": webhook.last_error or None,
        "next_try": next_try if webhook.num_failures else None,
    }
