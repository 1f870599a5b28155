"""/v1/tenants: admin only."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import Field

from torchrelay.gateway.auth.tenants import Tenant
from torchrelay.gateway.core import ServiceClassName
from torchrelay.gateway.http.dependencies import Admin, ServicesOf
from torchrelay.gateway.http.routes.limits import LimitFields, limits_shown
from torchrelay.gateway.whole_number import WholeNumber

router = APIRouter(prefix="/v1/tenants")


class TenantChange(LimitFields):
    """Omitted fields stay unchanged; ``null`` means no limit, and no class."""

    storage_quota_bytes: WholeNumber | None = Field(default=None, ge=0, lt=2**63)
    service_class: ServiceClassName | None = None


class NewTenant(TenantChange):
    name: str


@router.post("", status_code=201)
async def create(services: ServicesOf, _admin: Admin, body: NewTenant) -> dict[str, Any]:
    return _shown(await services.tenants.create(**body.model_dump()))


@router.get("")
async def all_tenants(services: ServicesOf, admin: Admin) -> dict[str, Any]:
    async with services.lists.turn(admin.tenant_id):
        tenants = await services.tenants.list()
    return {"object": "list", "data": [_shown(tenant) for tenant in tenants]}


@router.patch("/{name}")
async def change(services: ServicesOf, _admin: Admin, name: str, body: TenantChange) -> dict[str, Any]:
    """New limits and a new class apply to the next request; a smaller quota keeps stored models but rejects uploads."""
    return _shown(await services.tenants.change(name, body.model_dump(exclude_unset=True)))


def _shown(tenant: Tenant) -> dict[str, Any]:
    return {
        "id": tenant.tenant_id,
        "object": "tenant",
        "name": tenant.name,
        "storage_quota_bytes": tenant.storage_quota_bytes,
        **limits_shown(tenant.limits),
        "service_class": tenant.service_class,
        "created": tenant.created_unix_us // 1_000_000,
    }
