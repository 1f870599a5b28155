"""The gateway's ASGI application: routes the token path to its own app, everything else that needs a key to FastAPI.

FastAPI reads a body before it looks at the key. So the key, the tenant's share and the declared length are checked
here, and FastAPI gets requests whose body has been read within its limit; files of uploads are streamed through.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import quote

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torchrelay.common.errors import InvalidRequest, PermissionDenied, TorchrelayError
from torchrelay.common.ids import new_id
from torchrelay.gateway.bodies.unusable_text import check_text
from torchrelay.gateway.exchange.errors import body, refusal
from torchrelay.gateway.exchange.http_exchange import CLOSE
from torchrelay.gateway.exchange.http_request import HttpRequest
from torchrelay.gateway.inference.core import ClientDisconnected
from torchrelay.gateway.inference.interfaces import Authenticator
from torchrelay.gateway.limits.connection_shares import ConnectionShares
from torchrelay.gateway.sql.audit import ACTOR

_UPLOAD_OF_FILE = re.compile("/v1/uploads/[^/]+/files/")
_COMMIT = re.compile("/v1/uploads/[^/]+/commit")

_MAX_BODY_BYTES, _MAX_DECLARATION_BYTES = 64 << 10, 1 << 20  # of every route; of POST /v1/uploads
_MAX_VALUES = 1 << 14  # FastAPI makes an error for each unknown field and each faulty value

Page = Callable[[], Awaitable[tuple[int, bytes]]]  # status and JSON


class AsgiRouter:
    """The application; ``tokens`` are those of the token path, by path."""

    def __init__(
        self,
        tokens: Mapping[str, ASGIApp],
        pages: Mapping[str, Page],
        rest: ASGIApp,
        keys: Authenticator,
        shares: ConnectionShares,
    ) -> None:
        self._tokens = tokens
        self._pages = pages
        self._rest = rest
        self._keys = keys
        self._shares = shares

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"unsupported ASGI scope {scope['type']}")
        scope = with_plain_path(scope)
        if (tokens := self._tokens.get(scope["path"])) is not None:
            await tokens(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # the server sends of a HEAD's answer only the head
            scope = {**scope, "method": "GET"}
        request = HttpRequest(scope, receive)
        request_id = new_id("req")
        scope.setdefault("state", {})["request_id"] = request_id
        answering = _answering(request, request_id, send)
        if scope["method"] == "GET" and (page := self._pages.get(scope["path"])) is not None:
            status, encoded = await page()
            await Response(encoded, status, media_type="application/json")(scope, receive, answering)
            return
        try:
            caller = await request.authenticate(self._keys)
            if "\0" in scope["path"] or b"%00" in scope["query_string"]:
                raise InvalidRequest("the path and the query must not have a NUL character")
            if scope["path"] in self._pages:
                message = f"method {scope['method']} is not allowed for {scope['path']}; use GET"
                answer = JSONResponse(body(405, message, code="method_not_allowed"), 405, {"allow": "GET, HEAD"})
                await answer(scope, receive, answering)
                return
            if caller.is_admin and caller.role == "viewer" and scope["method"] not in ("GET", "HEAD"):
                raise PermissionDenied(
                    f"{caller.person} is a viewer, who may change nothing: ask an admin for the role"
                )
            scope["state"]["caller"] = caller
            ACTOR.set(caller.actor)
            with self._shares.requests.held(caller.tenant_id):
                is_of_upload = scope["method"] == "PUT" and _UPLOAD_OF_FILE.match(scope["path"])
                if is_of_upload or (scope["method"] == "POST" and scope["path"] == "/v1/files"):
                    with self._shares.uploads.held(caller.tenant_id):
                        await self._rest(scope, request.receive_part, answering)
                elif scope["method"] == "POST" and _COMMIT.fullmatch(scope["path"]):
                    with self._shares.uploads.held(caller.tenant_id):
                        await self._with_body(request, caller.tenant_id, scope, answering)
                else:
                    await self._with_body(request, caller.tenant_id, scope, answering)
        except ClientDisconnected:
            return
        except TorchrelayError as error:
            await refusal(error)(scope, receive, answering)

    async def _with_body(self, request: HttpRequest, tenant_id: str, scope: Scope, send: Send) -> None:
        is_declaration = scope["method"] == "POST" and scope["path"] == "/v1/uploads"
        max_bytes = _MAX_DECLARATION_BYTES if is_declaration else _MAX_BODY_BYTES
        with self._shares.body_bytes.account(tenant_id) as body_bytes:
            encoded = bytes(await request.read(max_bytes, body_bytes, setting=""))
            if sum(map(encoded.count, (b",", b"[", b"{"))) > _MAX_VALUES:
                raise InvalidRequest(f"the body has more than {_MAX_VALUES:,} commas and opening brackets")
            check_text(encoded)
            await self._rest(scope, _replayed(encoded, request.receive), send)


def with_plain_path(scope: Scope) -> Scope:
    """The scope with a path without empty parts, as some clients join a base URL and a route. The names of uploaded
    files stay as they are.
    """
    path: str = scope["path"]
    if ("//" in path or path.endswith("/")) and not _UPLOAD_OF_FILE.search(path):
        path = "/" + "/".join(filter(None, path.split("/")))
        return {**scope, "path": path, "raw_path": quote(path).encode()}
    return scope


def _replayed(encoded: bytes, receive: Receive) -> Receive:
    """A body that has been read, and then what follows it."""
    messages: list[Message] = [{"type": "http.request", "body": encoded, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed


def _answering(request: HttpRequest, request_id: str, send: Send) -> Callable[[Message], Awaitable[None]]:
    """Adds the request's id to the answer, and the end of the connection if the answer ends it."""

    async def answering(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message["headers"], *request.id_headers((b"x-request-id",), request_id)]
            message = {**message, "headers": [*headers, CLOSE] if request.must_close else headers}
        await send(message)

    return answering
