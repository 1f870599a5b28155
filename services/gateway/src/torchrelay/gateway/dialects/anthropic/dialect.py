"""``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from torchrelay.common.errors import TorchrelayError
from torchrelay.common.ids import new_id
from torchrelay.gateway.core import Principal
from torchrelay.gateway.dialects.anthropic import errors, requests
from torchrelay.gateway.dialects.anthropic.replies import MessageEncoder, whole_message
from torchrelay.gateway.exchange.asgi_app import TokenPathApp
from torchrelay.gateway.exchange.dialect import Call
from torchrelay.gateway.exchange.http_exchange import HttpExchange
from torchrelay.gateway.exchange.whole_answer import read_whole
from torchrelay.gateway.inference.pipeline import RequestSession
from torchrelay.gateway.limits.shares import ShareAccount

PATH, COUNT_PATH = "/v1/messages", "/v1/messages/count_tokens"


class AnthropicDialect:
    """The dialect of Anthropic's Messages API."""

    id_headers: Sequence[bytes] = (b"request-id", b"x-request-id")

    def new_id(self) -> str:
        return new_id("req")

    def error_body(self, error: TorchrelayError, request_id: str) -> dict[str, Any]:
        return errors.error_body(error, request_id)

    def decode(self, encoded: bytearray, path: str) -> Call:
        body = requests.decode_body(encoded)
        return Call([requests.params_of(body)], bool(body.stream), MessageReplies(requests.shows_reasoning(body)))


@dataclass(frozen=True, slots=True)
class MessageReplies:
    """Writes messages. ``shows_reasoning``: with blocks of thinking."""

    shows_reasoning: bool

    def encoder(self, session: RequestSession, reply_id: str, first_index: int, held: ShareAccount) -> MessageEncoder:
        return MessageEncoder(session, self.shows_reasoning)

    async def whole(self, sessions: Sequence[RequestSession], held: ShareAccount) -> bytes:
        [session] = sessions
        [choice], usage = await read_whole(session, None, held)
        return whole_message(session, self.shows_reasoning, choice, usage)


class CountTokensApp(TokenPathApp):
    """Counts the tokens of a prompt."""

    async def complete(self, exchange: HttpExchange, path: str, principal: Principal, held: ShareAccount) -> None:
        with self.shares.body_bytes.account(principal.tenant_id) as body_bytes:
            body = requests.decode_body(await self.read(exchange, body_bytes))
            num_tokens = await self.pipeline.num_prompt_tokens(principal, requests.prompt_of(body))
        await exchange.reply(msgspec.json.encode({"input_tokens": num_tokens}))
