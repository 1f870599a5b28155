"""The FastAPI application."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from torchrelay.gateway.http.dependencies import Services
from torchrelay.gateway.http.error_handlers import install_error_handlers
from torchrelay.gateway.http.routes import billing, explain, keys, models, orphans, tenants, uploads


def make_app(services: Services) -> FastAPI:
    """All routes except the token path."""
    app = FastAPI(title="Torchrelay", version="1", docs_url=None, redoc_url=None)
    app.state.services = services
    install_error_handlers(app)
    for part in (tenants, keys, uploads, models, orphans, billing, explain):
        app.include_router(part.router)

    @app.get("/health")
    async def health() -> JSONResponse:
        """Which parts of the platform do not answer; 503 when the gateway is useless without them."""
        report = await services.health.report()
        body = {"status": report.status, "unavailable": [*report.essential], "degraded": [*report.others]}
        return JSONResponse(body, 503 if report.essential else 200)

    return app
