"""The REST API on a real socket, in front of a scripted store and scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shutil import copyfile

import httpx
import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from tests.unit.gateway.conftest import PEPPER, AccountingRig
from tests.unit.gateway.scripted_services import ScriptedScheduler, ScriptedStore, serving
from torchrelay.common.health import Health
from torchrelay.gateway.auth.identities import Identities
from torchrelay.gateway.auth.operators import Operators
from torchrelay.gateway.batches.files import Files
from torchrelay.gateway.batches.table import Batches
from torchrelay.gateway.billing.invoices import Invoices
from torchrelay.gateway.catalog.uploads import Uploads
from torchrelay.gateway.clients.param_store import StoreClient
from torchrelay.gateway.clients.scheduler import SchedulerClient
from torchrelay.gateway.core import PublishedModel
from torchrelay.gateway.http import rest_app
from torchrelay.gateway.http.dependencies import Services
from torchrelay.gateway.http.openapi import TOKEN_PATHS
from torchrelay.gateway.http.router import AsgiRouter
from torchrelay.gateway.http.server import http_server
from torchrelay.gateway.limits.change_rate import ChangeRate
from torchrelay.gateway.limits.connection_shares import ConnectionShares, connection_shares
from torchrelay.gateway.limits.limiter import Limiter
from torchrelay.gateway.settings import GatewaySettings
from torchrelay.gateway.webhooks.webhooks import Webhooks

ROUTES = cache(rest_app.routes_app)  # FastAPI takes half a second for their first requests


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """uvloop, as the gateway itself: its transports differ from asyncio's where connections are closed and paused."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def database_url(sqlite_template: Path, tmp_path: Path) -> str:
    """SQLite only: differences between databases are tested in sql/ and billing/."""
    return f"sqlite:///{copyfile(sqlite_template, tmp_path / 'ledger.db')}"


@dataclass
class RestRig:
    url: str
    parts: AccountingRig
    store: ScriptedStore
    services: Services
    admin: httpx.AsyncClient
    acme: httpx.AsyncClient
    settings: GatewaySettings
    shares: ConnectionShares
    port: int
    events: list[tuple[str, str]]
    router: AsgiRouter
    scheduler: ScriptedScheduler

    async def client_of(self, tenant: str, storage_quota_bytes: int | None = None) -> httpx.AsyncClient:
        """A client with a key of another, new tenant; the caller closes it."""
        made = await self.parts.tenants.create(tenant, storage_quota_bytes=storage_quota_bytes)
        _, token = await self.parts.keys.create(made.tenant_id)
        return client(self.url, token)


def client(url: str, token: str) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {token}"}
    # Without TLS's authorities, whose certificates take 0.03 s to load.
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=10, trust_env=False, verify=False)


async def _tokens(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"tokens"})


@pytest.fixture
async def rig(parts: AccountingRig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RestRig]:
    monkeypatch.setattr(rest_app, "routes_app", ROUTES)
    events: list[tuple[str, str]] = []

    async def model_changed(kind: str, name: str, model: PublishedModel | None) -> None:
        events.append((kind, name))

    settings = GatewaySettings(
        max_body_bytes=64 << 10,
        max_open_requests_per_tenant=30,
        max_buffered_body_bytes=1 << 18,
        max_buffered_body_bytes_per_tenant=1 << 17,
        max_uploads_per_tenant=2,
    )
    shares = connection_shares(settings)
    async with AsyncExitStack() as stack:
        store, scripted = ScriptedStore(), ScriptedScheduler()  # type: ignore[abstract]
        channel = await stack.enter_async_context(serving(store, scripted))
        store_client, scheduler = StoreClient(channel, "store:1"), SchedulerClient(channel, "scheduler:1")
        operators = Operators(parts.database, parts.table_versions, PEPPER)
        services = Services(
            database=parts.database,
            tenants=parts.tenants,
            operators=operators,
            webhooks=Webhooks(parts.database),
            keys=parts.keys,
            limits=Limiter("", parts.database, lease_s=60),
            catalog=parts.catalog,
            prices=parts.prices,
            invoices=Invoices(parts.database),
            registers=lambda: None,
            uploads=Uploads(parts.database, parts.catalog, store_client),
            files=(files := Files(parts.database, store_client, max_files=3)),
            batches=Batches(parts.database, files, max_open=2),
            store=store_client,
            scheduler=scheduler,
            queries=shares.queries,
            lists=shares.lists,
            explanations=shares.explanations,
            changes=ChangeRate(),
            default_idle_timeout_s=0.0,
            default_max_instances=8,
            health=Health({"database": parts.database.ask}, {}),
            model_changed=model_changed,
        )
        rest = rest_app.make_app(services)
        pages = rest_app.public_pages(rest, services.health)
        app = AsgiRouter(
            dict.fromkeys(TOKEN_PATHS, _tokens), pages, rest, Identities(parts.keys, operators, None), shares
        )
        http = await stack.enter_async_context(http_server(app, "127.0.0.1", 0, drain_s=1))
        url = f"http://127.0.0.1:{http.port}"
        _, token = await parts.keys.create(parts.acme.tenant_id, name="first")
        admin = await stack.enter_async_context(client(url, "tra-test"))
        acme = await stack.enter_async_context(client(url, token))
        yield RestRig(url, parts, store, services, admin, acme, settings, shares, http.port, events, app, scripted)
