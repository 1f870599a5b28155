"""A streamed answer as its client sees it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from torchrelay.cli.errors import api_error


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that ended. Times are in seconds from the load's begin; ``due_s`` is when it should have been sent."""

    due_s: float
    sent_s: float
    ended_s: float
    first_s: float | None = None
    last_s: float | None = None
    gaps_s: tuple[float, ...] = ()  # between tokens
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    request_id: str = ""
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        """From when it was due: a client that is late hides no wait."""
        return None if self.first_s is None else self.first_s - self.due_s

    @property
    def tpot_s(self) -> float:
        """Per token after the first; 0 without any."""
        if self.first_s is None or self.last_s is None or self.num_output_tokens < 2:
            return 0.0
        return (self.last_s - self.first_s) / (self.num_output_tokens - 1)


@dataclass(slots=True)
class AnswerStream:
    """The events of a streamed completion with ``return_token_ids`` and usage, as their bytes arrive."""

    first_s: float | None = None
    last_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    num_tokens: int = 0
    is_ended: bool = False
    _rest: bytes = b""

    def feed(self, data: bytes, now_s: float) -> None:
        """Tokens that arrive together share the time since the token before. Raises ``ApiError`` for an error event."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if num_tokens := sum(self._num_tokens(line) for line in lines if line.startswith(b"data:")):
            if self.first_s is None or self.last_s is None:
                self.first_s, num_after = now_s, num_tokens - 1
                self.gaps_s += [0.0] * num_after
            else:
                self.gaps_s += [(now_s - self.last_s) / num_tokens] * num_tokens
            self.last_s = now_s
            self.num_tokens += num_tokens

    def _num_tokens(self, line: bytes) -> int:
        text = line.removeprefix(b"data:").strip()
        if text == b"[DONE]":
            self.is_ended = True
            return 0
        event = json.loads(text)
        if "error" in event:
            raise api_error(text, 500)
        self.usage = event.get("usage") or self.usage
        return sum(len(choice.get("token_ids") or ()) for choice in event["choices"])

    def fault(self, num_wanted: int) -> str:
        """Returns what the answer lacks; empty if nothing."""
        if not self.is_ended:
            return "the stream ended early"
        if self.num_tokens != num_wanted:
            return f"an answer had {self.num_tokens} tokens instead of {num_wanted}"
        return ""
