"""The FastAPI application."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import msgspec
from fastapi import FastAPI

from torchrelay.gateway.http.dependencies import Services
from torchrelay.gateway.http.error_handlers import install_error_handlers
from torchrelay.gateway.http.routes import billing, explain, keys, models, tenants, uploads


def make_app(services: Services) -> FastAPI:
    """All routes except the token path."""
    app = FastAPI(title="Torchrelay", version="1", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.services = services
    install_error_handlers(app)
    for part in (tenants, keys, uploads, models, billing, explain):
        app.include_router(part.router)

    return app


def public_pages(app: FastAPI) -> Mapping[str, Callable[[], bytes]]:
    """What is shown without a key, and says nothing about a tenant; ready as bytes, since strangers may ask often.

    ``/health`` is the liveness of this process only; other services may recover by themselves.
    """
    return {"/health": lambda: b'{"status":"ok"}', "/openapi.json": cache(lambda: msgspec.json.encode(app.openapi()))}
