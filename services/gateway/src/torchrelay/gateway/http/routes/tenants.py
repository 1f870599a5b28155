"""/v1/tenants: admin only."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import Field

from torchrelay.common.clock import now_unix_us
from torchrelay.gateway.auth.tenants import Tenant
from torchrelay.gateway.core import ServiceClassName
from torchrelay.gateway.http.dependencies import Admin, Owner, ServicesOf
from torchrelay.gateway.http.routes.limits import LimitFields, limits_shown
from torchrelay.gateway.whole_number import WholeNumber

router = APIRouter(prefix="/v1/tenants")


class TenantChange(LimitFields):
    """Omitted fields stay unchanged; ``null`` means no limit, and no class."""

    suspended: bool | None = None
    storage_quota_bytes: WholeNumber | None = Field(default=None, ge=0, lt=2**63)
    service_class: ServiceClassName | None = None


class NewTenant(TenantChange):
    name: str


@router.post("", status_code=201)
async def create(services: ServicesOf, _admin: Admin, body: NewTenant) -> dict[str, Any]:
    return _shown(await services.tenants.create(body.name, **_columns(body)))


@router.get("")
async def all_tenants(services: ServicesOf, admin: Admin) -> dict[str, Any]:
    async with services.lists.turn(admin.tenant_id):
        tenants = await services.tenants.list()
    return {"object": "list", "data": [_shown(tenant) for tenant in tenants]}


@router.patch("/{name}")
async def change(services: ServicesOf, _admin: Admin, name: str, body: TenantChange) -> dict[str, Any]:
    """New limits and a new class apply to the next request; a smaller quota keeps stored models but rejects uploads."""
    return _shown(await services.tenants.change(name, _columns(body)))


@router.delete("/{name}")
async def delete(services: ServicesOf, admin: Owner, name: str) -> dict[str, Any]:
    """Deletes a tenant's keys, models, uploads and files. Its ledger, bills and audit log stay; its name is not free.

    Its requests are refused from the beginning on; a deletion that was broken off can be repeated.
    """
    tenant = await services.tenants.by_name(name)
    if not tenant.is_suspended:
        await services.tenants.change(name, {"suspended_unix_us": now_unix_us()})
    await services.batches.cancel_all(tenant.tenant_id)
    await services.files.drop_all(tenant.tenant_id)
    for upload in await services.uploads.list(admin):
        if upload.tenant_id == tenant.tenant_id:
            await services.uploads.abort(upload)
    its_models = [each for each in await services.catalog.models(admin) if each.tenant_id == tenant.tenant_id]
    for model in sorted(its_models, key=lambda each: not each.parent):  # adapters before their bases
        await services.catalog.delete(model)
        await services.model_changed("deleted", model.name, None)
    if not tenant.is_deleted:
        await services.tenants.mark_deleted(tenant)
    kept = ["ledger", "usage", "invoices", "audit log"]
    return {"id": tenant.tenant_id, "object": "tenant", "name": name, "deleted": True, "kept": kept}


def _columns(body: TenantChange) -> dict[str, Any]:
    """The given fields as columns."""
    given = body.model_dump(exclude_unset=True, exclude={"name", "suspended"})
    if body.suspended is not None:
        given["suspended_unix_us"] = now_unix_us() if body.suspended else None
    return given


def _shown(tenant: Tenant) -> dict[str, Any]:
    return {
        "id": tenant.tenant_id,
        "object": "tenant",
        "name": tenant.name,
        "storage_quota_bytes": tenant.storage_quota_bytes,
        **limits_shown(tenant.limits),
        "service_class": tenant.service_class,
        "suspended": tenant.is_suspended,
        "deleted": tenant.is_deleted,
        "created": tenant.created_unix_us // 1_000_000,
    }
