"""``/v1/messages`` and ``/v1/messages/count_tokens``, as a bare ASGI application like that of OpenAI's paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.types import Send

from torchrelay.common.errors import TorchrelayError
from torchrelay.gateway.anthropic import errors, replies, requests
from torchrelay.gateway.anthropic.replies import MessageEncoder
from torchrelay.gateway.core import Principal
from torchrelay.gateway.inference.core import GenerateParams
from torchrelay.gateway.inference.pipeline import RequestSession
from torchrelay.gateway.limits.shares import ShareAccount
from torchrelay.gateway.openai.asgi_app import CompletionsApp, HttpExchange
from torchrelay.gateway.openai.http_request import HttpRequest
from torchrelay.gateway.openai.replies import Answer, ReplyFormat

_COUNT_TOKENS = "/v1/messages/count_tokens"
PATHS = frozenset(("/v1/messages", _COUNT_TOKENS))


class MessageExchange(HttpExchange):
    """A request and its response, in Anthropic's formats."""

    id_headers = (b"request-id", b"x-request-id")

    def error_body(self, error: TorchrelayError) -> Any:
        return errors.error_body(error, self.request_id)

    def error_event(self, error: TorchrelayError) -> bytes:
        return replies.error_event(self.error_body(error))

    def encoder(self, session: RequestSession, reply_format: ReplyFormat, first_index: int) -> MessageEncoder:
        return MessageEncoder(session, reply_format.shows_reasoning)

    def whole(self, sessions: Sequence[RequestSession], reply_format: ReplyFormat, answers: Sequence[Answer]) -> bytes:
        [session], [answer] = sessions, answers
        return replies.whole_message(session, reply_format.shows_reasoning, answer.choices[0], answer.usage)


class MessagesApp(CompletionsApp):
    """The ASGI application, for the requests that the router sends it: HTTP, and a path of ``PATHS``."""

    def _exchange(self, request: HttpRequest, send: Send) -> MessageExchange:
        return MessageExchange(request, send, self._write_gap_s)

    async def _complete(self, exchange: HttpExchange, path: str, principal: Principal, held: ShareAccount) -> None:
        if path != _COUNT_TOKENS:
            await super()._complete(exchange, path, principal, held)
            return
        with self._shares.body_bytes.account(principal.tenant_id) as body_bytes:
            body = requests.decode_body(await exchange.request.read(self._max_body_bytes, body_bytes))
            num_tokens = await self._pipeline.num_prompt_tokens(principal, requests.prompt_of(body))
        await exchange.reply({"input_tokens": num_tokens})

    def _decoded(self, encoded: bytearray, path: str) -> tuple[list[GenerateParams], ReplyFormat, bool]:
        body = requests.decode_body(encoded)
        reply_format = ReplyFormat(is_chat=True, shows_reasoning=requests.shows_reasoning(body))
        return [requests.params_of(body)], reply_format, bool(body.stream)
