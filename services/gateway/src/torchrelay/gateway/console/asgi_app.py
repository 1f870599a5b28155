"""Serves /console: the static files to anybody, the live stream to a key."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from torchrelay.common.errors import TorchrelayError
from torchrelay.gateway.console.live_feed import LiveFeed
from torchrelay.gateway.console.static_files import static_files
from torchrelay.gateway.exchange.errors import refusal
from torchrelay.gateway.exchange.http_request import HttpRequest
from torchrelay.gateway.inference.interfaces import Authenticator
from torchrelay.gateway.limits.connection_shares import ConnectionShares

LIVE_PATH = "/console/live"


class ConsoleApp:
    """Answers the console's paths, and passes all others to ``app``."""

    def __init__(self, app: ASGIApp, feed: LiveFeed, keys: Authenticator, shares: ConnectionShares) -> None:
        self._app = app
        self._feed = feed
        self._keys = keys
        self._shares = shares

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].rstrip("/")
        if scope["method"] == "GET" and path == LIVE_PATH:
            await self._stream(scope, receive, send)
        elif scope["method"] in ("GET", "HEAD") and (file := static_files().get(path)) is not None:
            await file(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = HttpRequest(scope, receive)
        try:
            caller = await request.authenticate(self._keys)
            with self._shares.requests.held(caller.tenant_id), self._feed.watched():
                headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                leaving = asyncio.create_task(_left(receive))
                try:
                    while (encoded := await self._feed.next(caller, leaving)) is not None:
                        # A revoked key sees nothing more.
                        await self._keys.authenticate(request.authorization)
                        event = b"data: " + encoded + b"\n\n"
                        await send({"type": "http.response.body", "body": event, "more_body": True})
                except TorchrelayError:  # the client asks again, and reads the refusal
                    pass
                finally:
                    leaving.cancel()
                await send({"type": "http.response.body", "body": b""})
        except TorchrelayError as error:
            await refusal(error)(scope, receive, send)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
