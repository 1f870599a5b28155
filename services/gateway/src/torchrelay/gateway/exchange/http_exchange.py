"""An HTTP request and its response."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from typing import Final

import msgspec
from starlette.types import Receive, Scope, Send

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import TorchrelayError
from torchrelay.gateway.core import RatesLeft
from torchrelay.gateway.exchange.dialect import Dialect, StreamEncoder
from torchrelay.gateway.exchange.errors import error_headers, rate_headers
from torchrelay.gateway.exchange.http_request import HttpRequest
from torchrelay.gateway.exchange.sse import data_event
from torchrelay.gateway.limits.shares import ShareAccount

CLOSE: Final = (b"connection", b"close")  # of an answer that ends the connection
_JSON: Final = (b"content-type", b"application/json")
_EVENTS: Final = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


def encoded_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Headers as ASGI has them."""
    return [(name.encode(), value.encode()) for name, value in headers.items()]


class HttpExchange:
    """An HTTP request and its response, whose errors are in the form of ``dialect``."""

    answer_bytes: ShareAccount  # of what is kept of the answer, once the key is checked

    def __init__(self, scope: Scope, receive: Receive, send: Send, dialect: Dialect) -> None:
        self.request = HttpRequest(scope, receive)
        self.request_id, self.arrived_unix_us = dialect.new_id(), now_unix_us()
        self.rates = RatesLeft()
        self.left_out: tuple[str, ...] = ()  # of the prompt
        self.encoder: StreamEncoder | None = None  # of a streamed answer
        self.has_begun = False
        self._send, self._dialect, self._state = send, dialect, scope.get("state", {})

    async def reply(self, encoded: bytes) -> None:
        """Answers with JSON."""
        await self._reply(200, encoded)

    async def reply_in_parts(self, parts: Iterable[bytes]) -> None:
        """Answers with the parts of a JSON, each of which is made when the client has taken those before."""
        await self._begin(200, [_JSON])
        for part in parts:
            await self.send(part)
            await asyncio.sleep(0)
        await self.send_last(b"")

    async def begin_events(self) -> None:
        await self._begin(200, _EVENTS)

    def send(self, body: bytes) -> Awaitable[None]:
        return self._send({"type": "http.response.body", "body": body, "more_body": True})

    def send_last(self, body: bytes) -> Awaitable[None]:
        return self._send({"type": "http.response.body", "body": body})

    async def refuse(self, error: TorchrelayError, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        listed = [*headers, CLOSE] if self.request.must_close else headers
        await self._reply(error.http_status, msgspec.json.encode(self._error_body(error)), listed)

    async def fail(self, error: TorchrelayError) -> None:
        """Reports an error: by status and body, or as the last event if the response has begun."""
        self._state["answer_broke"] = self.has_begun
        if not self.has_begun:
            await self.refuse(error, encoded_headers(error_headers(error)))
        elif self.encoder is not None:
            await self.send_last(self.encoder.failed(error))
        else:
            await self.send_last(data_event(self._error_body(error)))

    def _error_body(self, error: TorchrelayError) -> object:
        return self._dialect.error_body(error, self.request_id)

    async def _reply(self, status: int, encoded: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        await self._begin(status, [_JSON, (b"content-length", str(len(encoded)).encode()), *headers])
        await self.send_last(encoded)

    async def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.has_begun = True
        elapsed_ms = max(0, now_unix_us() - self.arrived_unix_us) // 1000  # until the answer begins
        listed = [*headers, *self.request.id_headers(self._dialect.id_headers, self.request_id)]
        listed.append((b"openai-processing-ms", b"%d" % elapsed_ms))
        if self.left_out:
            listed.append((b"x-torchrelay-left-out", ", ".join(self.left_out).encode()))
        listed += encoded_headers(rate_headers(self.rates))
        await self._send({"type": "http.response.start", "status": status, "headers": listed})
