"""Dependencies of the REST routes: services, the caller, its tenant."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer

from torchrelay.common.errors import InvalidRequest, ModelNotFound, PermissionDenied
from torchrelay.common.health import Health
from torchrelay.gateway.auth.api_keys import ApiKeys
from torchrelay.gateway.auth.operators import Operators
from torchrelay.gateway.auth.tenants import Tenant, Tenants
from torchrelay.gateway.batches.files import Files
from torchrelay.gateway.batches.table import Batches
from torchrelay.gateway.billing.invoices import Invoices
from torchrelay.gateway.billing.orphan_sweep import RegisterSource
from torchrelay.gateway.billing.prices import Prices
from torchrelay.gateway.catalog.catalog import Catalog
from torchrelay.gateway.catalog.uploads import Uploads
from torchrelay.gateway.clients.param_store import StoreClient
from torchrelay.gateway.clients.scheduler import SchedulerClient
from torchrelay.gateway.core import Principal, PublishedModel
from torchrelay.gateway.limits.change_rate import ChangeRate
from torchrelay.gateway.limits.limiter import Limiter
from torchrelay.gateway.limits.tenant_turns import TenantTurns
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.webhooks.webhooks import Webhooks

ModelChanged = Callable[[str, str, PublishedModel | None], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Services:
    database: Database
    tenants: Tenants
    keys: ApiKeys
    operators: Operators
    webhooks: Webhooks
    limits: Limiter
    catalog: Catalog
    prices: Prices
    invoices: Invoices
    registers: Callable[[], RegisterSource | None]  # None until NATS is connected
    uploads: Uploads
    files: Files
    batches: Batches
    store: StoreClient
    scheduler: SchedulerClient
    queries: TenantTurns
    lists: TenantTurns
    explanations: TenantTurns
    changes: ChangeRate
    default_idle_timeout_s: float  # the scheduler's, as is the next
    default_max_instances: int
    health: Health
    model_changed: ModelChanged  # ("published" or "deleted", name, model): publishes a history event


def services_of(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


ServicesOf = Annotated[Services, Depends(services_of)]


_BEARER = HTTPBearer(auto_error=False, description="A tenant's key (tr-...) or the admin key (tra-...)")


def _caller(request: Request, _documented: Annotated[object, Depends(_BEARER)]) -> Principal:
    """The caller, whom the router authenticated before it read the body."""
    caller: Principal = request.state.caller
    return caller


Caller = Annotated[Principal, Depends(_caller)]


def _changer(services: ServicesOf, caller: Caller) -> Principal:
    if not caller.is_admin:
        services.changes.take(caller.tenant_id)
    return caller


Changer = Annotated[Principal, Depends(_changer)]  # the caller, whose change counts in its tenant's rate


def _admin(caller: Caller) -> Principal:
    if not caller.is_admin:
        raise PermissionDenied("this requires the admin key, or that of an operator")
    return caller


Admin = Annotated[Principal, Depends(_admin)]  # an operator of any role; the router lets viewers change nothing


def _owner(caller: Admin) -> Principal:
    if caller.role != "admin":
        raise PermissionDenied(f"this requires the role admin; {caller.person} has the role {caller.role}")
    return caller


Owner = Annotated[Principal, Depends(_owner)]


def check_query(request: Request) -> None:
    """Raises ``InvalidRequest`` for a query parameter that the route does not have, or that comes twice."""
    route: APIRoute = request.scope["route"]
    known = {parameter.alias for parameter in route.dependant.query_params}
    for name in request.query_params:
        if name == "beta" and "anthropic-version" in request.headers:  # Anthropic's client sends it with some calls
            continue
        if name not in known:
            hint = f"; known are {', '.join(sorted(known))}" if known else ""
            raise InvalidRequest(f"unknown query parameter {name[:80]!r}{hint}", field=name[:80])
        if len(request.query_params.getlist(name)) > 1:
            raise InvalidRequest(f"the query parameter {name} must be given once", field=name)


async def tenant_of(services: Services, caller: Principal, named: str | None) -> Tenant:
    """The tenant a request is about: the caller's own, or the one the admin names.

    A tenant's key naming another tenant is rejected, whether or not that tenant exists.
    """
    if caller.is_admin and not named:
        raise InvalidRequest("tenant is required with the admin key", field="tenant")
    if not caller.is_admin and named and named != caller.tenant:
        raise PermissionDenied("this key belongs to another tenant", field="tenant")
    return await services.tenants.by_name(named or caller.tenant)


async def ledger_scope(
    services: Services, caller: Principal, tenant: str | None, model: str | None
) -> tuple[str | None, str | None]:
    """The tenant id (None: all, for the admin alone) and the model's full name (None: any) that a query asks for."""
    is_of_all = caller.is_admin and tenant is None
    tenant_id = None if is_of_all else (await tenant_of(services, caller, tenant)).tenant_id
    if model is not None and "/" not in model:
        if is_of_all:
            raise InvalidRequest("model must be TENANT/NAME unless tenant is given", field="model")
        model = f"{tenant or caller.tenant}/{model}"
    if model is not None:
        with suppress(ModelNotFound):  # it may have been deleted, and was billed before
            model = (await services.catalog.resolve(caller, model)).name  # an alias stands for its model
    return tenant_id, model
