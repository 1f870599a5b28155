"""An HTTP request of either application: its head, and its body, which is read later and within limits."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from starlette.types import Message, Receive, Scope

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.validation import quote_value
from torchrelay.gateway.core import Principal
from torchrelay.gateway.inference.core import ClientDisconnected
from torchrelay.gateway.inference.interfaces import Authenticator
from torchrelay.gateway.limits.shares import ShareAccount

BODY_SILENCE_S: Final = 30.0  # between two parts of a body
_CALLERS_ID: Final = re.compile(rb"[!-~]{1,128}")


class BodyTooLarge(InvalidRequest):
    """A body above the limit of its route."""

    http_status = 413

    def __init__(self, max_bytes: int, setting: str) -> None:
        source = f" (the gateway's {setting} setting)" if setting else ""
        super().__init__(f"the body is larger than {max_bytes:,} bytes{source}")


class BodyLate(InvalidRequest):
    """A body that stops."""

    http_status = 408

    def __init__(self) -> None:
        super().__init__(f"nothing of the body arrived for {BODY_SILENCE_S:g} s")


class EncodedBody(InvalidRequest):
    """A compressed body."""

    http_status = 415

    def __init__(self, encoding: str) -> None:
        text = f"Content-Encoding {quote_value(encoding)} is not supported: send the body without compression"
        super().__init__(text, field="Content-Encoding")


def authorization_of(scope: Mapping[str, Any]) -> str | None:
    """The ``Authorization`` header, or the key that Anthropic's clients send in ``x-api-key``."""
    given = dict(reversed(scope["headers"]))  # of repeated headers the first counts
    if (authorization := given.get(b"authorization")) is not None:
        return str(authorization.decode("latin-1"))
    key = given.get(b"x-api-key")
    return None if key is None else f"Bearer {key.decode('latin-1')}"


class OtherThanJson(InvalidRequest):
    """A body that its header declares as something else."""

    http_status = 415

    def __init__(self, content_type: str) -> None:
        text = (
            f"Content-Type {quote_value(content_type)} is not supported: send JSON, as `Content-Type: application/json`"
        )
        super().__init__(text, field="Content-Type")


class HttpRequest:
    """An HTTP request. Nothing of its body is read before ``read`` or ``receive`` is called."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.receive = receive
        self._declared_bytes = 0
        self._encoding = "identity"
        self._expects_continue = False  # the client sends the body once it is asked for it
        self._content_type = ""  # empty: the client does not say
        self.has_unread_body = False
        self.authorization = authorization_of(scope)
        self.callers_id = b""
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit():  # the server has refused any other
                self._declared_bytes = int(value)
                self.has_unread_body = self._declared_bytes > 0
            elif name == b"transfer-encoding":
                self.has_unread_body = True
            elif name == b"expect":
                self._expects_continue = True
            elif name == b"content-encoding":
                self._encoding = value.decode("latin-1").strip().lower()
            elif name in (b"x-request-id", b"x-client-request-id") and _CALLERS_ID.fullmatch(value):
                self.callers_id = value
            elif name == b"content-type":
                self._content_type = value.decode("latin-1").strip()

    def id_headers(self, names: Sequence[bytes], request_id: str) -> list[tuple[bytes, bytes]]:
        """The headers of an answer that name the request: its id, and that of its caller if there is one."""
        headers = [(name, request_id.encode()) for name in names]
        return [*headers, (b"x-client-request-id", self.callers_id)] if self.callers_id else headers

    @property
    def must_close(self) -> bool:
        """Whether an answer now ends the connection, since the client may leave out the unread body.

        Otherwise the server discards the rest of a body, as a reset could overtake the answer.
        """
        return self.has_unread_body and self._expects_continue

    async def authenticate(self, keys: Authenticator) -> Principal:
        """The caller. Raises as ``Authenticator`` does."""
        return await keys.authenticate(self.authorization)

    async def read(self, max_bytes: int, account: ShareAccount, setting: str = "max_body_bytes") -> bytearray:
        """The whole body, counted in ``account`` as it arrives. ``setting`` gives the limit; empty: it is fixed.

        Raises ``EncodedBody``; ``OtherThanJson``; ``BodyTooLarge``, at once if that much is declared; ``BodyLate``;
        ``ClientDisconnected`` before the end of the body, and as ``ShareAccount.take``.
        """
        if self._encoding not in ("identity", "") and self.has_unread_body:
            raise EncodedBody(self._encoding)
        if self._content_type and self.has_unread_body and not _is_json(self._content_type):
            raise OtherThanJson(self._content_type)
        if self._declared_bytes > max_bytes:
            raise BodyTooLarge(max_bytes, setting)
        received = bytearray()
        while self.has_unread_body:
            message = await self.receive_part()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            part = message.get("body", b"")
            if len(received) + len(part) > max_bytes:
                raise BodyTooLarge(max_bytes, setting)
            account.take(len(part))
            received += part
        return received

    async def receive_part(self) -> Message:
        """The next part of the body, or the end of the connection. Raises ``BodyLate``."""
        try:
            async with asyncio.timeout(BODY_SILENCE_S):
                message = await self.receive()
        except TimeoutError:
            raise BodyLate from None
        self.has_unread_body = message.get("more_body", False)
        return message

    @asynccontextmanager
    async def until_disconnect(self) -> AsyncIterator[None]:
        """Cancels the block once the client disconnects, and raises ``ClientDisconnected`` then.

        Nothing else may receive meanwhile: the body has been read.
        """
        task, has_left = asyncio.current_task(), False
        assert task is not None

        async def watch() -> None:
            nonlocal has_left
            while (await self.receive())["type"] != "http.disconnect":
                pass
            has_left = True
            task.cancel()

        watcher = asyncio.ensure_future(watch())
        try:
            try:
                yield
            finally:
                watcher.cancel()
                await asyncio.gather(watcher, return_exceptions=True)
        except asyncio.CancelledError:
            if has_left and not task.uncancel():
                raise ClientDisconnected from None
            raise
        if has_left:  # the block has taken the cancellation for its own
            task.uncancel()
            raise ClientDisconnected


def _is_json(content_type: str) -> bool:
    media_type = content_type.partition(";")[0].rstrip().lower()
    return media_type == "application/json" or (media_type.startswith("application/") and media_type.endswith("+json"))
