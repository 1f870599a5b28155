"""Replies in Anthropic's format: a message of blocks, at once or as events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torchrelay.gateway.core import FinishCause
from torchrelay.gateway.inference.core import TokenDelta, Usage
from torchrelay.gateway.inference.pipeline import RequestSession
from torchrelay.gateway.openai.replies import ChoiceBuffer, encode_json
from torchrelay.gateway.openai.tool_calls import ToolCall, ToolCallParser, divided


def usage_object(usage: Usage) -> dict[str, int]:
    """Input tokens do not count those that were cached."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_prompt_tokens,
        "output_tokens": usage.num_output_tokens,
    }


def whole_message(session: RequestSession, has_tools: bool, choice: ChoiceBuffer, usage: Usage) -> bytes:
    """The JSON of a finished message."""
    text, calls = "".join(choice.text), list[ToolCall]()
    if has_tools:
        text, calls = divided(text)
    content: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
    content += [_tool_use(call, json.loads(call.arguments)) for call in calls]
    ending = _ending(choice.finish, session.texts[0].stop_string, has_calls=bool(calls))
    return encode_json({**_head(session), "content": content, **ending, "usage": usage_object(usage)})


class MessageEncoder:
    """Encodes token deltas as the events of a message."""

    def __init__(self, session: RequestSession, has_tools: bool) -> None:
        self._session, self._text = session, session.texts[0]
        self._parser = ToolCallParser() if has_tools else None
        self._finish: FinishCause | None = None
        self._has_begun = self._is_text_open = False
        self._num_blocks = 0

    def keep_alive(self) -> bytes:
        return b"".join([*self._begin(), _event({"type": "ping"})])

    def of(self, deltas: Iterable[TokenDelta]) -> bytes:
        """The events of tokens: the beginning of the message, of blocks, their text, and their end."""
        events = [*self._begin()]
        for delta in deltas:
            text = "".join([self._text.step(token_id) for token_id in delta.token_ids])
            if delta.finish is not None:
                self._finish = delta.finish
                text += self._text.flush()
            for part in self._parts(text):
                events += self._shown(part) if isinstance(part, str) else self._called(part)
        return b"".join(events)

    def end(self, usage: Usage) -> bytes:
        """The last events."""
        has_calls = self._parser is not None and self._parser.num_calls > 0
        ending = _ending(self._finish, self._text.stop_string, has_calls=has_calls)
        last = {"type": "message_delta", "delta": ending, "usage": usage_object(usage)}
        return b"".join([*self._begin(), *self._end_text(), _event(last), _event({"type": "message_stop"})])

    def _begin(self) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            usage = usage_object(Usage(len(self._session.request.resolved.prompt), 0, 0))
            message = {**_head(self._session), "content": [], "stop_reason": None, "stop_sequence": None}
            yield _event({"type": "message_start", "message": {**message, "usage": usage}})

    def _parts(self, text: str) -> Sequence[str | ToolCall]:
        if self._parser is None:
            return [text]
        parts = self._parser.push(text)
        return parts if self._finish is None else [*parts, self._parser.flush()]

    def _shown(self, text: str) -> Iterator[bytes]:
        if not text:
            return
        if not self._is_text_open:
            self._is_text_open = True
            yield self._block({"type": "text", "text": ""})
        yield self._delta({"type": "text_delta", "text": text})

    def _called(self, call: ToolCall) -> Iterator[bytes]:
        yield from self._end_text()
        yield self._block(_tool_use(call, {}))
        yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        yield self._end_block()

    def _end_text(self) -> Iterator[bytes]:
        if self._is_text_open:
            self._is_text_open = False
            yield self._end_block()

    def _block(self, block: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_start", "index": self._num_blocks, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._num_blocks, "delta": delta})

    def _end_block(self) -> bytes:
        self._num_blocks += 1
        return _event({"type": "content_block_stop", "index": self._num_blocks - 1})


def error_event(body: dict[str, Any]) -> bytes:
    """The last event of a failed stream."""
    return _event(body)


def _event(event: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), encode_json(event))


def _head(session: RequestSession) -> dict[str, Any]:
    resolved = session.request.resolved
    return {"id": resolved.request_id, "type": "message", "role": "assistant", "model": resolved.model.name}


def _tool_use(call: ToolCall, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _ending(cause: FinishCause | None, stop_string: str, *, has_calls: bool) -> dict[str, Any]:
    if has_calls and cause is FinishCause.STOP:
        reason = "tool_use"
    elif stop_string:
        reason = "stop_sequence"
    else:
        reason = "max_tokens" if cause is FinishCause.LENGTH else "end_turn"
    return {"stop_reason": reason, "stop_sequence": stop_string or None}
