"""A streamed chat: messages in, events of the answer out, with latency and rate."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.errors import Unreachable, api_error
from torchrelay.common.quantities import format_count, format_duration

Message = dict[str, str]
MIN_RATE_SPAN_S = 0.05  # over a shorter span the rate is noise


@dataclass(frozen=True, slots=True)
class ChatEvent:
    """An event of the stream. ``is_waiting``: the request is queued, or the model is loading."""

    request_id: str = ""
    text: str = ""
    finish: str = ""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # in the last event only
    is_waiting: bool = False
    is_end: bool = False


def parse_event(line: bytes) -> ChatEvent | None:
    """Parses a line of server-sent events; ``None`` if it has no content. Raises ``ApiError``."""
    if line.startswith(b":"):
        return ChatEvent(is_waiting=True)
    if not line.startswith(b"data:"):
        return None
    data = line.removeprefix(b"data:").strip()
    if data == b"[DONE]":
        return ChatEvent(is_end=True)
    chunk: dict[str, Any] = json.loads(data)
    if "error" in chunk:
        raise api_error(data, 500)
    text, finish = "", ""
    for choice in chunk.get("choices", ()):
        text += choice.get("delta", {}).get("content") or ""
        finish = choice.get("finish_reason") or finish
    usage = chunk.get("usage") or {}
    return ChatEvent(
        str(chunk.get("id", "")), text, finish, usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    )


def stream_chat(
    client: GatewayClient, model: str, messages: list[Message], options: dict[str, Any]
) -> Generator[ChatEvent, None, None]:
    """Events of one answer as they arrive. Closing the generator cancels the request. Raises ``CliError``."""
    body = {"model": model, "messages": messages, "stream": True, "stream_options": {"include_usage": True}, **options}
    with client.stream("POST", "/v1/chat/completions", json=body) as lines:
        for line in lines:
            event = parse_event(line)
            if event is not None and event.is_end:
                return
            if event is not None:
                yield event
    raise Unreachable("the stream ended early", "retry")


@dataclass(slots=True)
class Answer:
    """An answer as it arrives; ``clock`` gives the time in seconds."""

    clock: Callable[[], float]
    begin_s: float = field(init=False)
    first_s: float | None = None
    last_s: float | None = None
    text: str = ""
    request_id: str = ""
    finish: str = ""
    num_output_tokens: int = 0

    def __post_init__(self) -> None:
        self.begin_s = self.clock()

    def add(self, event: ChatEvent) -> None:
        self.request_id = event.request_id or self.request_id
        self.finish = event.finish or self.finish
        self.num_output_tokens = event.num_output_tokens or self.num_output_tokens
        if event.text:
            self.last_s = self.clock()
            self.first_s = self.last_s if self.first_s is None else self.first_s
            self.text += event.text

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the question to the first text; ``None`` when none came."""
        return None if self.first_s is None else self.first_s - self.begin_s

    @property
    def tokens_per_s(self) -> float | None:
        """Rate of the tokens after the first; ``None`` when too few, or too close together, to measure."""
        if self.first_s is None or self.last_s is None or self.num_output_tokens < 2:
            return None
        if self.last_s - self.first_s < MIN_RATE_SPAN_S:
            return None
        return (self.num_output_tokens - 1) / (self.last_s - self.first_s)

    def summary(self) -> str:
        """``first token after 42 ms · 18 tokens · 310 tokens/s · req-...``"""
        parts = [] if self.ttft_s is None else [f"first token after {format_duration(self.ttft_s)}"]
        if self.num_output_tokens:
            parts.append(format_count(self.num_output_tokens, "token"))
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:{'.3g' if self.tokens_per_s < 1000 else '.0f'}} tokens/s")
        if self.finish == "length":
            parts.append("cut off at max_tokens")
        return " · ".join([*parts, self.request_id] if self.request_id else parts)
