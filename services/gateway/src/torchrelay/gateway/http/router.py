"""The gateway's one ASGI application: the token path goes to its own handler, everything else to FastAPI.

Bodies of everything else are bounded here, file uploads excepted: those are streamed on and never held.
"""

from __future__ import annotations

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torchrelay.gateway.openai.asgi_app import PATHS
from torchrelay.gateway.openai.errors import body, too_large


class AsgiRouter:
    def __init__(self, tokens: ASGIApp, rest: ASGIApp, max_body_bytes: int) -> None:
        self._tokens = tokens
        self._rest = rest
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._rest(scope, receive, send)
        elif scope["path"] in PATHS:
            await self._tokens(scope, receive, send)
        elif scope["method"] == "PUT" and scope["path"].startswith("/v1/uploads/"):
            await self._rest(scope, receive, send)
        elif _declared_bytes(scope) > self._max_body_bytes:
            await _send_too_large(send, self._max_body_bytes)
        else:
            await self._rest(scope, self._bounded(receive), send)

    def _bounded(self, receive: Receive) -> Receive:
        """A body without a declared length is refused where it grows too long, by the application's own handlers."""
        num_received = 0

        async def bounded() -> Message:
            nonlocal num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            if num_received > self._max_body_bytes:
                raise HTTPException(413, too_large(self._max_body_bytes))
            return message

        return bounded


def _declared_bytes(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


async def _send_too_large(send: Send, max_body_bytes: int) -> None:
    said = msgspec.json.encode(body(413, too_large(max_body_bytes), code="invalid_request"))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(said)).encode())]
    await send({"type": "http.response.start", "status": 413, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": said})
