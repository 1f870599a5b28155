"""/v1/keys: a tenant's keys; managed with any of them, or with the admin key."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from torchrelay.common.errors import PermissionDenied
from torchrelay.gateway.auth.api_keys import KeyInfo
from torchrelay.gateway.core import ServiceClassName
from torchrelay.gateway.http.dependencies import Caller, Changer, ServicesOf, tenant_of
from torchrelay.gateway.whole_number import WholeNumber

router = APIRouter(prefix="/v1/keys")


class NewKey(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = Field(default="", max_length=200)
    tenant: str | None = None
    requests_per_minute: WholeNumber | None = Field(default=None, ge=1, lt=2**31)
    service_class: ServiceClassName | None = None


@router.post("", status_code=201)
async def create(services: ServicesOf, caller: Changer, body: NewKey) -> dict[str, Any]:
    tenant = await tenant_of(services, caller, body.tenant)
    if caller.requests_per_minute is not None:  # each new key would have a rate of its own
        raise PermissionDenied("a key with requests_per_minute cannot create keys; use a key without, or the admin's")
    info, token = await services.keys.create(
        tenant.name, tenant.tenant_id, body.name, body.requests_per_minute, body.service_class
    )
    return {**_shown(info), "key": token}


@router.get("")
async def all_keys(services: ServicesOf, caller: Caller) -> dict[str, Any]:
    async with services.lists.turn(caller.tenant_id):
        infos = await services.keys.list(None if caller.is_admin else caller.tenant_id)
    return {"object": "list", "data": [_shown(info) for info in infos]}


@router.delete("/{key_id}", status_code=204)
async def revoke(services: ServicesOf, caller: Changer, key_id: str) -> None:
    await services.keys.revoke(key_id, None if caller.is_admin else caller.tenant_id)


def _shown(info: KeyInfo) -> dict[str, Any]:
    return {
        "id": info.key_id,
        "object": "key",
        "name": info.name,
        "tenant": info.tenant,
        "created": info.created_unix_us // 1_000_000,
        "requests_per_minute": info.requests_per_minute,
        "service_class": info.service_class,
        "revoked": info.is_revoked,
    }
