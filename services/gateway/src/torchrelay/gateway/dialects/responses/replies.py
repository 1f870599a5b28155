"""Replies in the format of the Responses API: a response, at once or as events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import TorchrelayError
from torchrelay.gateway.core import FinishCause, ServiceClass
from torchrelay.gateway.dialects.responses.events import Event, event_of
from torchrelay.gateway.dialects.responses.output import Output
from torchrelay.gateway.dialects.responses.requests import ResponseBody, TextFormat
from torchrelay.gateway.dialects.responses.tools import ToolName, Tools
from torchrelay.gateway.exchange.logprobs import LogprobFormatter
from torchrelay.gateway.exchange.sse import comment, encode_json
from torchrelay.gateway.exchange.whole_answer import ChoiceBuffer
from torchrelay.gateway.inference.answers.parts import Part
from torchrelay.gateway.inference.core import TokenDelta, Usage
from torchrelay.gateway.inference.pipeline import RequestSession
from torchrelay.gateway.limits.shares import ShareAccount

_TIERS: Final = {ServiceClass.STANDARD: "default", ServiceClass.BATCH: "flex", ServiceClass.INTERACTIVE: "priority"}


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The format of a response. ``settings``: the fields that repeat the request's, as JSON without its braces."""

    settings: bytes
    tool_names: Mapping[str, ToolName]


def format_of(body: ResponseBody, tools: Tools) -> ResponseFormat:
    """The format of the response to ``body``, which declares ``tools``."""
    settings = {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "store": False,
        "text": {"format": body.text.format if body.text and body.text.format else TextFormat("text")},
        "tool_choice": body.tool_choice or "auto",
        "tools": tools.declared,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "user": body.user,
    }
    return ResponseFormat(encode_json(settings)[1:-1], tools.names)


class Reply:
    """A response as it comes about."""

    def __init__(self, session: RequestSession, reply_format: ResponseFormat) -> None:
        self._resolved = session.request.resolved
        self._settings = reply_format.settings
        self._output = Output(reply_format.tool_names)
        self.note = self._output.note
        self.status = "in_progress"

    def add(self, parts: Iterable[Part]) -> list[Event]:
        """The events about further parts of the answer."""
        return [event for part in parts for event in self._output.add(part)]

    def end(self, cause: FinishCause | None) -> list[Event]:
        """The events about the end of the output."""
        self.status = "incomplete" if cause is FinishCause.LENGTH else "completed"
        return self._output.end(self.status)

    def encoded(self, usage: Usage | None = None, error: TorchrelayError | None = None) -> bytes:
        """The JSON of the response as it is now."""
        status, resolved = "failed" if error else self.status, self._resolved
        state = {
            "id": resolved.request_id,
            "object": "response",
            "created_at": resolved.arrived_unix_us // 1_000_000,
            "completed_at": now_unix_us() // 1_000_000 if status == "completed" else None,
            "status": status,
            "error": None if error is None else _error_object(error),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": resolved.model.name,
            "output": self._output.items,
            "service_tier": _TIERS[resolved.service_class],
            "temperature": resolved.sampling.temperature,
            "top_p": resolved.sampling.top_p,
            "usage": None if usage is None else usage_object(usage),
        }
        return b"%s,%s}" % (encode_json(state)[:-1], self._settings)


class ResponseEncoder:
    """Encodes token deltas as the events of a response."""

    def __init__(self, session: RequestSession, reply_format: ResponseFormat, held: ShareAccount) -> None:
        """``held`` counts logprobs, which the last events repeat."""
        self._session, self._held = session, held
        [self._choice] = self.choices = session.choices()
        self._logprobs = LogprobFormatter.for_session(session, is_chat=True)
        self._reply = Reply(session, reply_format)
        self._num_events = 0

    def keep_alive(self) -> bytes:
        return self._begin() + comment(self._session.request.waits_for)

    def of(self, deltas: Iterable[TokenDelta]) -> bytes:
        """The events of tokens; a comment if there are none, as while the model writes what is shown later."""
        encoded = [self._begin()]
        for delta in deltas:
            events: list[Event] = []
            for step in self._choice.read(delta):
                if self._logprobs is not None and step.scored is not None:
                    (logprobs,) = self._logprobs.encoded(step.scored)
                    self._held.take(len(logprobs))
                    self._reply.note(logprobs)
                events += self._reply.add(step.parts)
            if delta.finish is not None:
                events += self._reply.end(delta.finish)
            encoded += map(self._encoded, events)
        return b"".join(encoded) or comment(self._session.request.waits_for)

    def end(self, usage: Usage) -> bytes:
        """The last event."""
        return self._about_response(self._reply.status, self._reply.encoded(usage))

    def failed(self, error: TorchrelayError) -> bytes:
        """The last events of a failed stream."""
        event = event_of("error", code=error.code, message=error.message, param=error.field)
        return self._encoded(event) + self._about_response("failed", self._reply.encoded(error=error))

    def _begin(self) -> bytes:
        if self._num_events:
            return b""
        response = self._reply.encoded()
        return self._about_response("created", response) + self._about_response("in_progress", response)

    def _about_response(self, name: str, response: bytes) -> bytes:
        return self._encoded(Event(f"response.{name}".encode(), b'"response":' + response))

    def _encoded(self, event: Event) -> bytes:
        kind, fields = event
        self._num_events += 1
        numbered = kind, kind, fields, self._num_events - 1
        return b'event: %s\ndata: {"type":"%s",%s,"sequence_number":%d}\n\n' % numbered


def whole_response(session: RequestSession, reply_format: ResponseFormat, choice: ChoiceBuffer, usage: Usage) -> bytes:
    """The JSON of a finished response."""
    reply, begin = Reply(session, reply_format), 0
    for (logprobs,), end in zip(choice.logprobs, choice.num_parts, strict=True):
        reply.note(logprobs)
        reply.add(choice.parts[begin:end])
        begin = end
    reply.add(choice.parts[begin:])
    reply.end(choice.finish)
    return reply.encoded(usage)


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_prompt_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens or 0},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }


def _error_object(error: TorchrelayError) -> dict[str, str]:
    code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.http_status, "server_error")
    return {"code": code, "message": error.message}
