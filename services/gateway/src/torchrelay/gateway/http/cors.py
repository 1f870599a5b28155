"""CORS: lets pages of the operator's listed origins call the API from a browser (setting ``cors_origins``)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
# Headers of an answer that a page may read, beside the few that browsers always show.
_EXPOSED: Final = (
    *(
        "x-request-id",
        "request-id",
        "x-client-request-id",
        "x-torchrelay-left-out",
        "openai-processing-ms",
        "retry-after",
    ),
    *("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"),
    *("x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens", "idempotent-replayed"),
)


class CorsApp(CORSMiddleware):
    """Answers preflights, and adds the headers that browsers want to the answers of ``app``.

    Neither needs a key: a browser asks before it sends one, and shows a page no answer, not even a refusal, without the
    headers. Cookies are never allowed, since nothing reads them. Requests of other origins pass unchanged.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        super().__init__(
            app, origins, _METHODS, allow_headers=["*"], expose_headers=_EXPOSED, allow_private_network=True
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = Headers(scope=scope).get("origin")
        is_allowed = origin is not None and self.is_allowed_origin(origin)
        await (super().__call__ if is_allowed else self.app)(scope, receive, send)
