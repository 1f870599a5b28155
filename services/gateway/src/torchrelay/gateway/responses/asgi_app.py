"""``/v1/responses``, as a bare ASGI application like that of OpenAI's other paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from starlette.types import Send

from torchrelay.common.errors import TorchrelayError
from torchrelay.gateway.inference.core import GenerateParams
from torchrelay.gateway.inference.pipeline import RequestSession
from torchrelay.gateway.openai.asgi_app import CompletionsApp, HttpExchange
from torchrelay.gateway.openai.http_request import HttpRequest
from torchrelay.gateway.openai.replies import Answer, ReplyFormat
from torchrelay.gateway.responses import requests
from torchrelay.gateway.responses.events import underscored_id
from torchrelay.gateway.responses.replies import ResponseEncoder, ResponseFormat, format_of, whole_response

PATHS: Final = frozenset(("/v1/responses",))


class ResponseExchange(HttpExchange):
    """A request and its response, in the formats of the Responses API."""

    def __init__(self, request: HttpRequest, send: Send, write_gap_s: float) -> None:
        super().__init__(request, send, write_gap_s)
        self.request_id = underscored_id("resp")
        self._encoder: ResponseEncoder | None = None  # of a streamed response

    def error_event(self, error: TorchrelayError) -> bytes:
        return super().error_event(error) if self._encoder is None else self._encoder.failed(error)

    def encoder(self, session: RequestSession, reply_format: ReplyFormat, first_index: int) -> ResponseEncoder:
        assert isinstance(reply_format, ResponseFormat), "as _decoded makes it"
        self._encoder = ResponseEncoder(session, reply_format, self.answer_bytes)
        return self._encoder

    def whole(self, sessions: Sequence[RequestSession], reply_format: ReplyFormat, answers: Sequence[Answer]) -> bytes:
        assert isinstance(reply_format, ResponseFormat), "as _decoded makes it"
        [session], [answer] = sessions, answers
        return whole_response(session, reply_format, answer.choices[0], answer.usage)


class ResponsesApp(CompletionsApp):
    """The ASGI application, for the requests that the router sends it: HTTP, and a path of ``PATHS``."""

    def _exchange(self, request: HttpRequest, send: Send) -> ResponseExchange:
        return ResponseExchange(request, send, self._write_gap_s)

    def _decoded(self, encoded: bytearray, path: str) -> tuple[list[GenerateParams], ReplyFormat, bool]:
        body = requests.decode_body(encoded)
        params, tools = requests.params_of(body)
        return [params], format_of(body, tools), bool(body.stream)
