"""Replies in Anthropic's format: a message of blocks, at once or as events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from torchrelay.common.errors import TorchrelayError
from torchrelay.gateway.core import FinishCause
from torchrelay.gateway.dialects.anthropic.errors import error_body
from torchrelay.gateway.exchange.sse import encode_json
from torchrelay.gateway.exchange.whole_answer import ChoiceBuffer
from torchrelay.gateway.inference.answers.parts import CallArguments, CallBegin, Part, Reasoning, joined
from torchrelay.gateway.inference.core import TokenDelta, Usage
from torchrelay.gateway.inference.pipeline import RequestSession


def usage_object(usage: Usage) -> dict[str, int]:
    """Input tokens do not count those that were cached."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_prompt_tokens,
        "output_tokens": usage.num_output_tokens,
    }


def whole_message(session: RequestSession, shows_reasoning: bool, choice: ChoiceBuffer, usage: Usage) -> bytes:
    """The JSON of a finished message."""
    parsed = joined(choice.parts)
    content: list[dict[str, Any]] = []
    if parsed.reasoning and shows_reasoning:
        content.append(_thinking(parsed.reasoning))
    if parsed.content:
        content.append({"type": "text", "text": parsed.content})
    content += [_tool_use(call.id, call.name, _input(call.arguments)) for call in parsed.calls]
    ending = _ending(choice.finish, choice.stop_string, has_calls=bool(parsed.calls))
    return encode_json({**_head(session), "content": content, **ending, "usage": usage_object(usage)})


class MessageEncoder:
    """Encodes token deltas as the events of a message."""

    def __init__(self, session: RequestSession, shows_reasoning: bool) -> None:
        self._session = session
        [self._choice] = self.choices = session.choices()
        self._shows_reasoning = shows_reasoning
        self._finish: FinishCause | None = None
        self._has_begun = False
        self._open: str = ""  # the type of the block that goes on
        self._num_blocks = 0

    def keep_alive(self) -> bytes:
        return b"".join([*self._begin(), _event({"type": "ping"})])

    def of(self, deltas: Iterable[TokenDelta]) -> bytes:
        """The events of tokens: the beginning of the message, of blocks, their parts, and their end.

        A ping if there are none, as while the model thinks unseen.
        """
        events = [*self._begin()]
        for delta in deltas:
            self._finish = delta.finish or self._finish
            for step in self._choice.read(delta):
                for part in step.parts:
                    events += self._shown(part)
        return b"".join(events) or self.keep_alive()

    def end(self, usage: Usage) -> bytes:
        """The last events."""
        ending = _ending(self._finish, self._choice.stop_string, has_calls=self._choice.num_calls > 0)
        last = {"type": "message_delta", "delta": ending, "usage": usage_object(usage)}
        return b"".join([*self._begin(), *self._end_block(), _event(last), _event({"type": "message_stop"})])

    def failed(self, error: TorchrelayError) -> bytes:
        """The last event of a failed stream."""
        return _event(error_body(error, self._session.request.resolved.request_id))

    def _begin(self) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            request = self._session.request
            num_cached = request.usage.num_cached_prompt_tokens  # 0 in a stream that begins before its first token
            usage = usage_object(Usage(len(request.resolved.prompt), num_cached, 0))
            message = {**_head(self._session), "content": [], "stop_reason": None, "stop_sequence": None}
            yield _event({"type": "message_start", "message": {**message, "usage": usage}})

    def _shown(self, part: Part) -> Iterator[bytes]:
        match part:
            case str():
                yield from self._in_block({"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": part})
            case Reasoning(text):
                if self._shows_reasoning:
                    yield from self._in_block(_thinking(""))
                    yield self._delta({"type": "thinking_delta", "thinking": text})
            case CallBegin():
                yield from self._end_block()
                yield from self._in_block(_tool_use(part.id, part.name, {}))
            case CallArguments():
                yield self._delta({"type": "input_json_delta", "partial_json": part.text})

    def _in_block(self, block: dict[str, Any]) -> Iterator[bytes]:
        """Begins the block, unless one of its type goes on."""
        if self._open != block["type"]:
            yield from self._end_block()
            self._open = block["type"]
            yield _event({"type": "content_block_start", "index": self._num_blocks, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._num_blocks, "delta": delta})

    def _end_block(self) -> Iterator[bytes]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        if self._open:
            self._open = ""
            self._num_blocks += 1
            yield _event({"type": "content_block_stop", "index": self._num_blocks - 1})


def _event(event: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), encode_json(event))


def _head(session: RequestSession) -> dict[str, Any]:
    resolved = session.request.resolved
    return {"id": resolved.request_id, "type": "message", "role": "assistant", "model": resolved.model.name}


def _tool_use(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _input(arguments: str) -> dict[str, Any]:
    """The arguments as an object, which is empty where the model wrote no object."""
    try:
        decoded = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _ending(cause: FinishCause | None, stop_string: str, *, has_calls: bool) -> dict[str, Any]:
    if has_calls and cause is FinishCause.STOP:
        reason = "tool_use"
    elif stop_string:
        reason = "stop_sequence"
    else:
        reason = "max_tokens" if cause is FinishCause.LENGTH else "end_turn"
    return {"stop_reason": reason, "stop_sequence": stop_string or None}
