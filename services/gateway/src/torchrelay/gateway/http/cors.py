"""CORS: lets pages of the operator's listed origins call the API from a browser (setting ``cors_origins``)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

ANY_ORIGIN: Final = "*"
_METHODS: Final = b"GET, HEAD, POST, PUT, PATCH, DELETE"
# Headers of an answer that a page may read, beside the few that browsers always show.
_EXPOSED: Final = (
    b"x-request-id, x-client-request-id, x-torchrelay-left-out, openai-processing-ms, retry-after, "
    b"x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests"
)
_MAX_AGE_S: Final = b"600"  # for which a browser does not ask again


class CorsApp:
    """Answers preflights, and adds the headers that browsers want to the answers of ``app``.

    Neither needs a key: a browser asks before it sends one, and shows a page no answer, not even a refusal, without the
    headers. Cookies are never allowed, since nothing reads them.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self._app = app
        self._allows_all = ANY_ORIGIN in origins
        self._origins = {origin.encode() for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        origin = headers.get(b"origin")
        if origin is None or not (self._allows_all or origin in self._origins):
            await self._app(scope, receive, send)
            return
        added = [
            (b"access-control-allow-origin", b"*" if self._allows_all else origin),
            (b"access-control-expose-headers", _EXPOSED),
            (b"vary", b"origin"),
        ]
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            # Whatever the page wants to send: "*" does not cover Authorization, and SDKs have headers of their own.
            wanted = headers.get(b"access-control-request-headers", b"")
            added += [
                (b"access-control-allow-methods", _METHODS),
                (b"access-control-allow-headers", wanted),
                (b"access-control-max-age", _MAX_AGE_S),
            ]
            await send({"type": "http.response.start", "status": 204, "headers": added})
            await send({"type": "http.response.body"})
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        await self._app(scope, receive, with_headers)
