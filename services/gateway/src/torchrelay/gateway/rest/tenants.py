"""/v1/tenants: for the admin."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from torchrelay.gateway.rest.services import Admin, ServicesOf
from torchrelay.gateway.tenants import Tenant

router = APIRouter(prefix="/v1/tenants")


class NewTenant(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    storage_quota_bytes: int | None = Field(default=None, ge=0, lt=2**63)
    budget_nano: int | None = Field(default=None, ge=0, lt=2**53)


@router.post("", status_code=201)
async def create(services: ServicesOf, _admin: Admin, wanted: NewTenant) -> dict[str, Any]:
    return _shown(await services.tenants.create(wanted.name, wanted.storage_quota_bytes, wanted.budget_nano))


@router.get("")
async def all_tenants(services: ServicesOf, _admin: Admin) -> dict[str, Any]:
    return {"object": "list", "data": [_shown(tenant) for tenant in await services.tenants.list()]}


def _shown(tenant: Tenant) -> dict[str, Any]:
    return {
        "id": tenant.tenant_id,
        "object": "tenant",
        "name": tenant.name,
        "storage_quota_bytes": tenant.storage_quota_bytes,
        "budget_nano": tenant.budget_nano,
        "created": tenant.created_unix_us // 1_000_000,
    }
