"""/v1/tenants: for the admin."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from torchrelay.gateway.auth.tenants import Tenant
from torchrelay.gateway.http.dependencies import Admin, ServicesOf

router = APIRouter(prefix="/v1/tenants")


class NewTenant(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    storage_quota_bytes: int | None = Field(default=None, ge=0, lt=2**63)
    budget_nano: int | None = Field(default=None, ge=0, lt=2**53)


class TenantChange(BaseModel):
    """What is left out stays as it is; ``null`` is no limit."""

    model_config = ConfigDict(extra="forbid")
    storage_quota_bytes: int | None = Field(default=None, ge=0, lt=2**63)
    budget_nano: int | None = Field(default=None, ge=0, lt=2**53)


@router.post("", status_code=201)
async def create(services: ServicesOf, _admin: Admin, wanted: NewTenant) -> dict[str, Any]:
    return _shown(await services.tenants.create(wanted.name, wanted.storage_quota_bytes, wanted.budget_nano))


@router.get("")
async def all_tenants(services: ServicesOf, _admin: Admin) -> dict[str, Any]:
    return {"object": "list", "data": [_shown(tenant) for tenant in await services.tenants.list()]}


@router.patch("/{name}")
async def change(services: ServicesOf, _admin: Admin, name: str, wanted: TenantChange) -> dict[str, Any]:
    """A changed budget holds for the next request; a smaller quota keeps what is stored and refuses more."""
    return _shown(await services.tenants.change(name, wanted.model_dump(exclude_unset=True)))


def _shown(tenant: Tenant) -> dict[str, Any]:
    return {
        "id": tenant.tenant_id,
        "object": "tenant",
        "name": tenant.name,
        "storage_quota_bytes": tenant.storage_quota_bytes,
        "budget_nano": tenant.budget_nano,
        "created": tenant.created_unix_us // 1_000_000,
    }
