"""/v1/keys: a tenant's keys; managed with any of them that may, or with the admin key."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import InvalidRequest, PermissionDenied
from torchrelay.gateway.auth.api_keys import KeyInfo
from torchrelay.gateway.billing.usage_query import instant_of
from torchrelay.gateway.core import Principal, ServiceClassName
from torchrelay.gateway.http.dependencies import Caller, Changer, Services, ServicesOf, tenant_of
from torchrelay.gateway.http.routes.limits import LimitFields, limits_shown, use_shown
from torchrelay.gateway.limits.admission import KEY, TENANT

router = APIRouter(prefix="/v1/keys")
_MAX_OVERLAP_S = 30 * 86_400.0


class KeyFields(LimitFields):
    name: str = Field(default="", max_length=200)
    service_class: ServiceClassName | None = None
    models: Annotated[list[str], Field(min_length=1, max_length=100)] | None = None
    may_manage_keys: bool | None = None
    expires_at: str | None = None


class NewKey(KeyFields):
    tenant: str | None = None


class KeyChange(KeyFields):
    paused: bool | None = None


class Rotation(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    overlap_s: float = Field(default=86_400.0, ge=0, le=_MAX_OVERLAP_S, strict=False)


@router.post("", status_code=201)
async def create(services: ServicesOf, caller: Changer, body: NewKey) -> dict[str, Any]:
    tenant = await tenant_of(services, caller, body.tenant)
    _check_may_manage(caller)
    columns = await _columns(services, caller, tenant.name, body)
    info, token = await services.keys.create(tenant.tenant_id, **columns)
    return {**_shown(info), "key": token}


@router.get("")
async def all_keys(services: ServicesOf, caller: Caller) -> dict[str, Any]:
    """The tenant's keys; a key that may not manage keys sees itself alone."""
    if not caller.may_manage_keys:
        return {"object": "list", "data": [_shown(await services.keys.one(caller.key_id))]}
    async with services.lists.turn(caller.tenant_id):
        infos = await services.keys.list(None if caller.is_admin else caller.tenant_id)
    return {"object": "list", "data": [_shown(info) for info in infos]}


@router.get("/me")
async def current_key(services: ServicesOf, caller: Caller) -> dict[str, Any]:
    """The key of this request, with what it and its tenant use and have left."""
    if caller.is_admin:
        return {"id": caller.key_id, "object": "key", "tenant": None}
    use = await services.limits.use_of(caller)
    of_tenant = {"name": caller.tenant, **use_shown(use, TENANT)}
    if caller.person:  # of a token
        return {"id": caller.key_id, "object": "key", "tenant": caller.tenant, "limits_of_tenant": of_tenant}
    return {**_shown(await services.keys.one(caller.key_id)), **use_shown(use, KEY), "limits_of_tenant": of_tenant}


@router.patch("/{key_id}")
async def change(services: ServicesOf, caller: Changer, key_id: str, body: KeyChange) -> dict[str, Any]:
    """Omitted fields stay unchanged; ``null`` means no limit. Applies within a second."""
    _check_may_manage(caller)
    tenant = caller.tenant if not caller.is_admin else (await services.keys.one(key_id)).tenant
    columns = await _columns(services, caller, tenant, body)
    if body.paused is not None:
        columns["paused_unix_us"] = now_unix_us() if body.paused else None
    return _shown(await services.keys.change(key_id, _scope(caller), columns))


@router.post("/{key_id}/rotate")
async def rotate(services: ServicesOf, caller: Changer, key_id: str, body: Rotation) -> dict[str, Any]:
    """Gives the key another secret; the old one stays valid for ``overlap_s``. A key may rotate itself."""
    if caller.has_old_secret:
        raise PermissionDenied("this is the secret before the last rotation, which may not rotate the key again")
    if key_id != caller.key_id:
        _check_may_manage(caller)
    info, token = await services.keys.rotate(key_id, _scope(caller), body.overlap_s)
    return {**_shown(info), "key": token}


@router.delete("/{key_id}", status_code=204)
async def revoke(services: ServicesOf, caller: Changer, key_id: str) -> None:
    """Revokes a key; a key may revoke itself."""
    if key_id != caller.key_id:
        _check_may_manage(caller)
    await services.keys.revoke(key_id, _scope(caller))


def _scope(caller: Principal) -> str | None:
    return None if caller.is_admin else caller.tenant_id


def _check_may_manage(caller: Principal) -> None:
    if not caller.may_manage_keys:
        raise PermissionDenied(
            "this key may not manage keys: it has limits, models, a class or an expiry of its own, an old secret, or "
            "was made so; use a key that may, or the admin's"
        )


async def _columns(services: Services, caller: Principal, tenant: str, body: KeyFields) -> dict[str, Any]:
    """The given fields as columns."""
    given = body.model_dump(exclude_unset=True, exclude={"tenant", "paused", "expires_at"})
    if given.get("may_manage_keys", False) is None:
        raise InvalidRequest("may_manage_keys must be true or false, not null", field="may_manage_keys")
    if body.models is not None:
        full = [name if "/" in name else f"{tenant}/{name}" for name in body.models]
        for name in full:
            await services.catalog.resolve(caller, name)
        given["models"] = full
    if "expires_at" in body.model_fields_set:
        given["expires_unix_us"] = None if body.expires_at is None else _future(body.expires_at)
    return given


def _future(text: str) -> int:
    instant = instant_of(text, "expires_at")
    if instant <= now_unix_us():
        raise InvalidRequest("expires_at must be in the future", field="expires_at")
    return instant


def _shown(info: KeyInfo) -> dict[str, Any]:
    return {
        "id": info.key_id,
        "object": "key",
        "name": info.name,
        "tenant": info.tenant,
        "created": info.created_unix_us // 1_000_000,
        **limits_shown(info.limits),
        "service_class": info.service_class,
        "models": None if info.models is None else list(info.models),
        "may_manage_keys": info.may_manage_keys,
        "expires_at": _iso(info.expires_unix_us),
        "last_used_at": _iso(info.last_used_unix_us),
        "previous_valid_until": _iso(info.previous_until_unix_us),
        "paused": info.is_paused,
        "revoked": info.is_revoked,
    }


def _iso(unix_us: int | None) -> str | None:
    return None if unix_us is None else datetime.fromtimestamp(unix_us / 1e6, UTC).isoformat(timespec="seconds")
