"""``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torchrelay.common.errors import TorchrelayError
from torchrelay.common.ids import new_id
from torchrelay.gateway.bodies.shared_body import BaseBody
from torchrelay.gateway.dialects.openai import requests
from torchrelay.gateway.dialects.openai.prompt_logprobs import prompt_logprobs
from torchrelay.gateway.dialects.openai.replies import Answer, ReplyFormat, whole_reply
from torchrelay.gateway.dialects.openai.stream_encoder import SseEncoder
from torchrelay.gateway.exchange import errors
from torchrelay.gateway.exchange.concurrent import run_all
from torchrelay.gateway.exchange.dialect import Call
from torchrelay.gateway.exchange.logprobs import LogprobFormatter
from torchrelay.gateway.exchange.whole_answer import ChoiceBuffer, read_whole
from torchrelay.gateway.inference.pipeline import RequestSession
from torchrelay.gateway.limits.shares import ShareAccount

PATHS: Final[Mapping[str, bool]] = {"/v1/chat/completions": True, "/v1/completions": False}  # whether it is a chat


class OpenAiDialect:
    """OpenAI's dialect, in which all paths without a dialect of their own answer, too."""

    id_headers: Sequence[bytes] = (b"x-request-id",)

    def new_id(self) -> str:
        return new_id("req")

    def error_body(self, error: TorchrelayError, request_id: str) -> errors.ErrorBody:
        return errors.error_body(error)

    def decode(self, encoded: bytearray, path: str) -> Call:
        body: BaseBody
        is_chat, num_best, has_logprobs, num_echoed = PATHS[path], 0, True, None
        if is_chat:
            body = chat = requests.decode_chat(encoded)
            prompts = [requests.params_of_chat(chat)]
            shows_reasoning = chat.include_reasoning is not False
        else:
            body = completion = requests.decode_completion(encoded)
            prompts = [requests.params_of_completion(of_prompt) for of_prompt in requests.one_per_prompt(completion)]
            shows_reasoning = True  # as part of the text
            num_echoed = completion.logprobs if completion.echo else None
            if requests.chooses_best(completion):
                num_best, has_logprobs = completion.n or 1, completion.logprobs is not None
        wants_usage = bool(body.stream_options and body.stream_options.include_usage)
        has_ids = bool(body.return_token_ids)
        reply_format = ReplyFormat(
            is_chat, wants_usage, has_ids, shows_reasoning, num_best, has_logprobs, num_echoed, body.prompt_logprobs
        )
        return Call(prompts, bool(body.stream), CompletionReplies(reply_format))


@dataclass(frozen=True, slots=True)
class CompletionReplies:
    """Writes chat completions and completions."""

    format: ReplyFormat

    def encoder(self, session: RequestSession, reply_id: str, first_index: int, held: ShareAccount) -> SseEncoder:
        return SseEncoder(session, self.format, reply_id, first_index)

    async def whole(self, sessions: Sequence[RequestSession], held: ShareAccount) -> bytes:
        return whole_reply(self.format, await run_all(sessions, lambda session: self._answer(session, held)))

    async def _answer(self, session: RequestSession, held: ShareAccount) -> Answer:
        request, reply_format = session.request, self.format
        logprobs = LogprobFormatter.for_session(session, is_chat=reply_format.is_chat)
        if request.prompt_scores is not None:
            held.take(request.prompt_scores.num_bytes(request.resolved.sampling.prompt_logprobs))
        choices, usage = await read_whole(session, logprobs, held)
        if reply_format.num_best:
            choices = sorted(choices, key=ChoiceBuffer.mean_logprob, reverse=True)[: reply_format.num_best]
        scores = None
        if session.scored_by is not None:
            scores = await prompt_logprobs(session, reply_format.num_echoed_top, reply_format.num_prompt_top, held)
        return Answer(request.resolved, choices, usage, logprobs if reply_format.has_logprobs else None, scores)
