"""The token paths as bare ASGI applications, without framework code per token."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AsyncExitStack
from copy import copy
from typing import Self

from starlette.types import Receive, Scope, Send

from torchrelay.common.errors import InvalidRequest, TorchrelayError
from torchrelay.common.process.telemetry import get_logger
from torchrelay.gateway.core import Principal
from torchrelay.gateway.exchange.concurrent import run_all
from torchrelay.gateway.exchange.dialect import Dialect, Replies, StreamEncoder, total_usage
from torchrelay.gateway.exchange.http_exchange import HttpExchange
from torchrelay.gateway.inference.core import ClientDisconnected
from torchrelay.gateway.inference.execution.running_request import SETTLE_TIMEOUT_S
from torchrelay.gateway.inference.interfaces import Authenticator
from torchrelay.gateway.inference.pipeline import RequestPipeline, RequestSession
from torchrelay.gateway.limits.connection_shares import ConnectionShares
from torchrelay.gateway.limits.shares import ShareAccount

log = get_logger(__name__)

# Tokens arriving within one gap are written together, each still its own event: a write costs several times as much as
# everything else per token. Streams of up to a hundred tokens per second never wait, nor does a stream's last token.
WRITE_GAP_S = 0.010


class MethodNotAllowed(InvalidRequest):
    code = "method_not_allowed"
    http_status = 405


class TokenPathApp(ABC):
    """The ASGI application of a few paths, for the requests that the router sends it."""

    def __init__(
        self,
        dialect: Dialect,
        keys: Authenticator,
        pipeline: RequestPipeline,
        shares: ConnectionShares,
        max_body_bytes: int,
    ) -> None:
        self.dialect, self.pipeline, self.shares = dialect, pipeline, shares
        self._keys, self._max_body_bytes = keys, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(scope, receive, send, self.dialect)
        try:
            principal = await exchange.request.authenticate(self._keys)
            if scope["method"] != "POST":
                message = f"method {scope['method']} is not allowed for {scope['path']}; use POST"
                await exchange.refuse(MethodNotAllowed(message), [(b"allow", b"POST")])
                return
            shares, tenant_id = self.shares, principal.tenant_id
            with shares.requests.account(tenant_id) as held, shares.answer_bytes.account(tenant_id) as answer_bytes:
                held.take(1)
                exchange.answer_bytes = answer_bytes
                await self.complete(exchange, scope["path"], principal, held)
        except ClientDisconnected:
            return
        except TorchrelayError as error:
            await exchange.fail(error)
        except Exception:  # process boundary: the client gets an answer, the operator the traceback
            log.exception("request_crashed", request_id=exchange.request_id)
            await exchange.fail(TorchrelayError("internal error; include the request id when reporting it"))

    def with_pipeline(self, pipeline: RequestPipeline) -> Self:
        """The same application on another pipeline."""
        app = copy(self)
        app.pipeline = pipeline
        return app

    @abstractmethod
    async def complete(self, exchange: HttpExchange, path: str, principal: Principal, held: ShareAccount) -> None:
        """Answers the request. ``held``: the tenant's requests."""

    async def read(self, exchange: HttpExchange, body_bytes: ShareAccount) -> bytearray:
        """The body, within its limit; ``body_bytes`` counts it."""
        return await exchange.request.read(self._max_body_bytes, body_bytes)


class AnswersApp(TokenPathApp):
    """The application of paths whose requests are answered with text."""

    def __init__(
        self,
        dialect: Dialect,
        keys: Authenticator,
        pipeline: RequestPipeline,
        shares: ConnectionShares,
        max_body_bytes: int,
        write_gap_s: float = WRITE_GAP_S,
    ) -> None:
        super().__init__(dialect, keys, pipeline, shares, max_body_bytes)
        self._write_gap_s = write_gap_s

    async def complete(self, exchange: HttpExchange, path: str, principal: Principal, held: ShareAccount) -> None:
        """Answers each prompt by a request of its own, all at once."""
        with self.shares.body_bytes.account(principal.tenant_id) as body_bytes:
            encoded = await self.read(exchange, body_bytes)
            call = self.dialect.decode(encoded, path)
            exchange.left_out = call.prompts[0].left_out
            replies, is_stream, num_held_bytes = call.replies, call.is_stream, call.num_held_bytes
            held.take(len(call.prompts) - 1)
            entering = self.pipeline.sessions(principal, call.prompts, exchange.request_id, exchange.arrived_unix_us)
            del encoded, call  # otherwise kept until the end of the answer
            async with AsyncExitStack() as stack:
                async with exchange.request.until_disconnect():
                    sessions = await stack.enter_async_context(entering)
                body_bytes.release(num_held_bytes)  # the prompts are encoded
                exchange.rates = sessions[0].rates
                watcher = asyncio.ensure_future(_stop_on_disconnect(exchange, sessions))
                try:
                    if is_stream:
                        await self._stream(exchange, sessions, replies)
                    else:
                        await exchange.reply(await replies.whole(sessions, exchange.answer_bytes))
                finally:
                    watcher.cancel()
                    await asyncio.gather(watcher, return_exceptions=True)

    async def _stream(self, exchange: HttpExchange, sessions: Sequence[RequestSession], replies: Replies) -> None:
        encoders = [
            replies.encoder(session, exchange.request_id, number * len(session.texts), exchange.answer_bytes)
            for number, session in enumerate(sessions)
        ]
        exchange.encoder = encoders[0]
        pairs = list(zip(sessions, encoders, strict=True))
        await run_all(pairs, lambda pair: self._stream_events(exchange, *pair))
        usage = total_usage([session.usage(encoder.choices) for session, encoder in pairs])
        await exchange.send_last(encoders[0].end(usage))

    async def _stream_events(self, exchange: HttpExchange, session: RequestSession, events: StreamEncoder) -> None:
        request = session.request
        loop, written_at = asyncio.get_running_loop(), 0.0
        while not request.is_finished:
            deltas = await request.next()
            if not exchange.has_begun:
                await exchange.begin_events()
            await exchange.send(events.of(deltas) if deltas else events.keep_alive())
            last_at, written_at = written_at, loop.time()
            is_fast = len(deltas) > len(session.texts) or written_at - last_at < self._write_gap_s
            if is_fast and not request.is_finished:
                await request.pause(self._write_gap_s)
        await request.settled(SETTLE_TIMEOUT_S)


async def _stop_on_disconnect(exchange: HttpExchange, sessions: Sequence[RequestSession]) -> None:
    while (await exchange.request.receive())["type"] != "http.disconnect":
        pass
    for session in sessions:
        session.request.stop()
