"""Replies in OpenAI's format. Streamed chunks are spliced from bytes built once per request; only text is encoded.

Extensions, with ``return_token_ids``, as vLLM has them: ``token_ids`` per choice and chunk, and ``prompt_token_ids``
once in a chat, once per choice in a completion.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from torchrelay.gateway.core import FinishCause
from torchrelay.gateway.dialects.openai.prompt_logprobs import PromptLogprobs
from torchrelay.gateway.exchange.dialect import total_usage
from torchrelay.gateway.exchange.logprobs import LogprobFormatter
from torchrelay.gateway.exchange.sse import encode_json
from torchrelay.gateway.exchange.whole_answer import ChoiceBuffer
from torchrelay.gateway.inference.answers.parts import (
    CallArguments,
    CallBegin,
    Part,
    Reasoning,
    ToolCall,
    joined,
)
from torchrelay.gateway.inference.core import ResolvedRequest, Usage

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """The format of a reply."""

    is_chat: bool
    include_usage: bool = False
    return_token_ids: bool = False
    shows_reasoning: bool = True
    num_best: int = 0  # choices of each prompt to return, those with the highest mean logprob; 0: all
    has_logprobs: bool = True  # where the request has them
    num_echoed_top: int | None = None  # likely tokens beside each of an echoed prompt; None: no logprobs of it
    num_prompt_top: int | None = None  # the same in ``prompt_logprobs``


def usage_object(usage: Usage) -> dict[str, Any]:
    counts: dict[str, Any] = {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_prompt_tokens},
    }
    if usage.num_reasoning_tokens is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": usage.num_reasoning_tokens}
    return counts


def finish_reason(cause: FinishCause | None, has_calls: object) -> str:
    """The cause as clients know it: an answer that ends by itself after calls ends with them."""
    return "tool_calls" if has_calls and cause is FinishCause.STOP else str(cause)


def reasoning_fields(reasoning: str) -> dict[str, Any]:
    """The reasoning, or a piece of it, under the name of DeepSeek's API and that of vLLM and OpenRouter."""
    return {"reasoning_content": reasoning, "reasoning": reasoning}


def _call_object(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


@dataclass(frozen=True, slots=True)
class Answer:
    """All choices of a prompt."""

    resolved: ResolvedRequest
    choices: Sequence[ChoiceBuffer]
    usage: Usage
    logprobs: LogprobFormatter | None
    prompt_logprobs: PromptLogprobs | None = None

    def logprobs_of(self, choice: ChoiceBuffer) -> Any:
        """The ``logprobs`` of a choice; None if it has none."""
        if self.logprobs is None:
            return None
        if self.prompt_logprobs is not None and self.prompt_logprobs.echoed:
            return self.logprobs.of(choice.logprobs, self.prompt_logprobs.echoed)
        return self.logprobs.of(choice.logprobs)


def whole_reply(reply_format: ReplyFormat, answers: Sequence[Answer]) -> bytes:
    """The JSON of a finished request; the choices of each prompt follow those of the prompt before."""
    listed: list[dict[str, Any]] = []
    pairs = [(answer, choice) for answer in answers for choice in answer.choices]
    for index, (answer, choice) in enumerate(pairs):
        parsed = joined(choice.parts)
        text, calls = parsed.content, parsed.calls
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if parsed.reasoning and reply_format.shows_reasoning:
            message |= reasoning_fields(parsed.reasoning)
        if calls:
            message |= {"content": text or None, "tool_calls": [_call_object(call) for call in calls]}
        content = {"message": message} if reply_format.is_chat else {"text": text}
        entry: dict[str, Any] = {
            "index": index,
            **content,
            "logprobs": answer.logprobs_of(choice),
            "finish_reason": finish_reason(choice.finish, calls),
        }
        if reply_format.return_token_ids:
            entry["token_ids"] = choice.token_ids
            if not reply_format.is_chat:
                entry["prompt_token_ids"] = list(answer.resolved.prompt)
        if not reply_format.is_chat:
            entry |= _listed_logprobs(answer)
        listed.append(entry)
    resolved = answers[0].resolved
    reply: dict[str, Any] = {
        "id": resolved.request_id,
        "object": "chat.completion" if reply_format.is_chat else "text_completion",
        "created": int(time.time()),
        "model": resolved.model.name,
        "choices": listed,
        "usage": usage_object(total_usage([answer.usage for answer in answers])),
    }
    if reply_format.return_token_ids and reply_format.is_chat:
        reply["prompt_token_ids"] = list(resolved.prompt)
    if reply_format.is_chat:
        reply |= _listed_logprobs(answers[0])
    return msgspec.json.encode(reply)


def _listed_logprobs(answer: Answer) -> dict[str, Any]:
    listed = None if answer.prompt_logprobs is None else answer.prompt_logprobs.listed
    return {} if listed is None else {"prompt_logprobs": listed}


class StreamReply:
    """The events of a streamed reply: one per token, one at the end of each choice, then usage if requested.

    ``reply_id`` and ``first_index`` differ from the request's own if it is one of several prompts.
    """

    def __init__(self, resolved: ResolvedRequest, reply_format: ReplyFormat, reply_id: str, first_index: int) -> None:
        kind = b"chat.completion.chunk" if reply_format.is_chat else b"text_completion"
        self._format = reply_format
        self._head = b'data: {"id":%s,"object":"%s","created":%d,"model":%s' % (
            encode_json(reply_id),
            kind,
            int(time.time()),
            encode_json(resolved.model.name),
        )
        opening = b'"delta":{"content":' if reply_format.is_chat else b'"text":'
        self._heads = [
            b'%s,"choices":[{"index":%d,%s' % (self._head, first_index + choice, opening)
            for choice in range(resolved.num_choices)
        ]
        self._after_text = b"}" if reply_format.is_chat else b""
        self._usage_field = b',"usage":null' if reply_format.include_usage else b""
        self._token_tail = b'%s,"logprobs":null,"finish_reason":null}]%s}\n\n' % (self._after_text, self._usage_field)
        self._prompt = list(resolved.prompt) if reply_format.return_token_ids else []
        num_prompts = 1 if reply_format.is_chat else resolved.num_choices
        self._without_prompt = set(range(num_prompts if reply_format.return_token_ids else 0))

    def opening(self, choice: int, echo: str) -> bytes:
        """The first event of a choice: the role in a chat; in a completion the prompt's text, if it is echoed."""
        if not self._format.is_chat:
            if not echo:
                return b""
            tail = b'%s,"logprobs":null,"finish_reason":null}]' % self._ids(choice, b"")
            return self._heads[choice] + encode_json(echo) + tail + self._usage_field + b"}\n\n"
        head = b'%s,"choices":[{"index":%d,"delta":{"role":"assistant","content":""}' % (self._head, choice)
        prompt = self._prompt_ids(0)  # of a chat, whichever choice begins first
        return head + b',"logprobs":null,"finish_reason":null}]' + self._usage_field + prompt + b"}\n\n"

    def token(self, choice: int, text: str, token_id: int, logprobs: msgspec.Raw | None) -> bytes:
        """The event of a token, with its id and logprobs where requested; ``text`` is empty while a character is
        incomplete or a stop string possible.
        """
        if logprobs is None and not self._format.return_token_ids:
            return self._heads[choice] + encode_json(text) + self._token_tail
        tail = b'%s%s,"logprobs":%s,"finish_reason":null}]' % (
            self._after_text,
            self._ids(choice, b"%d" % token_id),
            encode_json(logprobs),
        )
        return self._heads[choice] + encode_json(text) + tail + self._usage_field + b"}\n\n"

    def part(self, choice: int, part: Part) -> bytes:
        """The event of a part of a chat, beside those of its tokens."""
        match part:
            case str():
                delta: dict[str, Any] = {"content": part}
            case Reasoning(text):
                delta = reasoning_fields(text)
            case CallBegin():
                begun = ToolCall(part.id, part.name)
                delta = {"tool_calls": [{"index": part.index, **_call_object(begun)}]}
            case CallArguments(index, text):
                delta = {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        head = b'%s,"choices":[{"index":%d,"delta":%s' % (self._head, choice, encode_json(delta))
        return head + b',"logprobs":null,"finish_reason":null}]' + self._usage_field + b"}\n\n"

    def finish(self, choice: int, text: str, reason: str) -> bytes:
        """The last event of a choice, with any text held back."""
        if self._format.is_chat and not text:
            head = b'%s,"choices":[{"index":%d,"delta":{}' % (self._head, choice)
        else:
            head = self._heads[choice] + encode_json(text) + self._after_text
        tail = b'%s,"logprobs":null,"finish_reason":"%s"}]' % (self._ids(choice, b""), reason.encode())
        return head + tail + self._usage_field + b"}\n\n"

    def usage(self, usage: Usage) -> bytes:
        """The usage event, which has no choices; empty unless requested."""
        if not self._format.include_usage:
            return b""
        return b'%s,"choices":[],"usage":%s}\n\n' % (self._head, encode_json(usage_object(usage)))

    def _ids(self, choice: int, token_id: bytes) -> bytes:
        """The token ids of an event of ``choice``, where requested; in a completion's first event also the prompt's."""
        if not self._format.return_token_ids:
            return b""
        return b',"token_ids":[%s]' % token_id + self._prompt_ids(choice)

    def _prompt_ids(self, choice: int) -> bytes:
        if choice not in self._without_prompt:
            return b""
        self._without_prompt.discard(choice)
        return b',"prompt_token_ids":' + encode_json(self._prompt)
