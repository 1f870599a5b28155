"""The FastAPI application."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import msgspec
from fastapi import Depends, FastAPI

from torchrelay.common.health import Health
from torchrelay.gateway.http.dependencies import Services, check_query
from torchrelay.gateway.http.error_handlers import install_error_handlers
from torchrelay.gateway.http.openapi import described
from torchrelay.gateway.http.router import Page
from torchrelay.gateway.http.routes import (
    audit,
    batches,
    billing,
    cluster,
    events,
    explain,
    files,
    keys,
    models,
    operators,
    orphans,
    requests,
    sizing,
    tenants,
    uploads,
    webhooks,
)

_ROOT = msgspec.json.encode({"name": "Torchrelay", "api": "/v1", "schema": "/openapi.json", "health": "/health"})


def make_app(services: Services) -> FastAPI:
    """All routes except the token paths."""
    app = routes_app()
    app.state.services = services
    return app


def routes_app() -> FastAPI:
    """The routes without what answers them: enough for the schema."""
    app = FastAPI(title="Torchrelay", version="1", docs_url=None, redoc_url=None, openapi_url=None)
    of_models = (uploads, models, files, batches, orphans)
    of_money = (billing, webhooks)
    parts = (operators, tenants, keys, audit, *of_models, *of_money, requests, explain, events, cluster, sizing)
    routers = [*(part.router for part in parts), models.versions_router]
    install_error_handlers(app, [route for router in routers for route in router.routes])
    for router in routers:
        app.include_router(router, dependencies=[Depends(check_query)])
    return app


def public_pages(app: FastAPI, health: Health) -> Mapping[str, Page]:
    """Pages that need no key and name no tenant. They are cheap, since any client may request them often."""

    async def health_page() -> tuple[int, bytes]:
        """Which parts of the platform do not answer; 503 when the gateway is useless without them."""
        report = await health.report()
        body = {"status": report.status, "unavailable": [*report.essential], "degraded": [*report.others]}
        return 503 if report.essential else 200, msgspec.json.encode(body)

    async def root_page() -> tuple[int, bytes]:
        """Where to go on; some clients ask for it to see whether a server is there."""
        return 200, _ROOT

    schema = cache(lambda: msgspec.json.encode(described(app)))

    async def openapi_page() -> tuple[int, bytes]:
        return 200, schema()

    return {"/": root_page, "/health": health_page, "/openapi.json": openapi_page}
