"""The call of a token path's application for a line of a batch, without HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import msgspec
from starlette.types import Message

from torchrelay.common.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    TorchrelayError,
    Unavailable,
)
from torchrelay.common.process.telemetry import get_logger
from torchrelay.gateway.billing.prices import Prices
from torchrelay.gateway.core import Principal, PublishedModel
from torchrelay.gateway.exchange.asgi_app import TokenPathApp
from torchrelay.gateway.exchange.http_exchange import HttpExchange
from torchrelay.gateway.inference.interfaces import ModelCatalog

log = get_logger(__name__)
MAX_ANSWER_BYTES = 8 << 20  # of a line
RETRIED = (Overloaded, Unavailable, DeadlineExceeded, Conflict)  # what another attempt may not meet


@dataclass(frozen=True, slots=True)
class LineAnswer:
    request_id: str
    status: int
    body: str


class BatchCatalog:
    """The models, with the prices of batches' lines."""

    def __init__(self, catalog: ModelCatalog, prices: Prices) -> None:
        self._catalog, self._prices = catalog, prices

    async def resolve(self, principal: Principal, name: str) -> PublishedModel:
        model = await self._catalog.resolve(principal, name)
        return replace(model, price=await self._prices.current(model.name, "batch"))

    async def models(self, principal: Principal) -> list[PublishedModel]:
        return await self._catalog.models(principal)


async def answer_of(app: TokenPathApp, principal: Principal | TorchrelayError, path: str, body: bytes) -> LineAnswer:
    """The answer of ``app``, whether it is a success or an error of the request. ``principal``: or why there is none.

    Raises ``RETRIED``.
    """
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    status, received = 500, bytearray()

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.get_running_loop().create_future()

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        received.extend(message.get("body", b""))
        if len(received) > MAX_ANSWER_BYTES:
            raise InvalidRequest(f"the answer has more than {MAX_ANSWER_BYTES:,} bytes; ask for less in a line")

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    exchange = HttpExchange(scope, receive, send, app.dialect)
    try:
        if isinstance(principal, TorchrelayError):
            raise principal
        shares, tenant_id = app.shares, principal.tenant_id
        with shares.requests.account(tenant_id) as held, shares.answer_bytes.account(tenant_id) as answer_bytes:
            held.take(1)
            exchange.answer_bytes = answer_bytes
            await app.complete(exchange, path, principal, held)
        return LineAnswer(exchange.request_id, status, received.decode())
    except RETRIED:
        raise
    except TorchrelayError as error:
        failure = error
    except Exception:  # as at the boundary of the token path
        log.exception("line_crashed", request_id=exchange.request_id)
        failure = TorchrelayError("internal error; include the request id when reporting it")
    encoded = msgspec.json.encode(app.dialect.error_body(failure, exchange.request_id))
    return LineAnswer(exchange.request_id, failure.http_status, encoded.decode())
