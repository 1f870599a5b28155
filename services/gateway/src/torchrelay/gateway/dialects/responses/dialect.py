"""``/v1/responses``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torchrelay.common.errors import TorchrelayError
from torchrelay.gateway.dialects.responses import requests
from torchrelay.gateway.dialects.responses.events import underscored_id
from torchrelay.gateway.dialects.responses.replies import ResponseEncoder, ResponseFormat, format_of, whole_response
from torchrelay.gateway.exchange import errors
from torchrelay.gateway.exchange.dialect import Call
from torchrelay.gateway.exchange.logprobs import LogprobFormatter
from torchrelay.gateway.exchange.whole_answer import read_whole
from torchrelay.gateway.inference.pipeline import RequestSession
from torchrelay.gateway.limits.shares import ShareAccount

PATH: Final = "/v1/responses"


class ResponsesDialect:
    """The dialect of OpenAI's Responses API."""

    id_headers: Sequence[bytes] = (b"x-request-id",)

    def new_id(self) -> str:
        return underscored_id("resp")

    def error_body(self, error: TorchrelayError, request_id: str) -> errors.ErrorBody:
        return errors.error_body(error)

    def decode(self, encoded: bytearray, path: str) -> Call:
        body = requests.decode_body(encoded)
        params, tools = requests.params_of(body)
        reply_format = format_of(body, tools)
        return Call([params], bool(body.stream), ResponseReplies(reply_format), len(reply_format.settings))


@dataclass(frozen=True, slots=True)
class ResponseReplies:
    """Writes responses."""

    format: ResponseFormat

    def encoder(self, session: RequestSession, reply_id: str, first_index: int, held: ShareAccount) -> ResponseEncoder:
        return ResponseEncoder(session, self.format, held)

    async def whole(self, sessions: Sequence[RequestSession], held: ShareAccount) -> bytes:
        [session] = sessions
        logprobs = LogprobFormatter.for_session(session, is_chat=True)
        [choice], usage = await read_whole(session, logprobs, held)
        return whole_response(session, self.format, choice, usage)
