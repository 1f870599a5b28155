"""The ``logprobs`` of a reply in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torchrelay.gateway.inference.core import TokenLogprobs
from torchrelay.gateway.inference.text.token_bytes import TokenBytes


class LogprobEntry(NamedTuple):
    """One token of an answer with its logarithms; ``offset`` is where it begins in the choice's text, in characters."""

    token_id: int
    logprobs: TokenLogprobs
    offset: int


class LogprobFormatter:
    """The ``logprobs`` of a choice or chunk, in the shape of its path."""

    def __init__(self, tokens: TokenBytes, is_chat: bool) -> None:
        self._tokens = tokens
        self._is_chat = is_chat

    def of(self, entries: Sequence[LogprobEntry]) -> dict[str, Any]:
        return self._chat(entries) if self._is_chat else self._completion(entries)

    def _chat(self, entries: Sequence[LogprobEntry]) -> dict[str, Any]:
        content = [
            self._entry(one.token_id, one.logprobs.chosen)
            | {"top_logprobs": [self._entry(token, value) for token, value in one.logprobs.top]}
            for one in entries
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, value: float) -> dict[str, Any]:
        spelt = self._tokens.of(token_id)
        return {"token": _shown(spelt), "logprob": value, "bytes": list(spelt)}

    def _completion(self, entries: Sequence[LogprobEntry]) -> dict[str, Any]:
        return {
            "tokens": [_shown(self._tokens.of(one.token_id)) for one in entries],
            "token_logprobs": [one.logprobs.chosen for one in entries],
            "top_logprobs": [self._top(one) for one in entries],
            "text_offset": [one.offset for one in entries],
        }

    def _top(self, one: LogprobEntry) -> dict[str, float]:
        """The likeliest, and the chosen one if it is not among them. Of tokens with one text the likeliest counts."""
        found: dict[str, float] = {}
        for token_id, value in (*one.logprobs.top, (one.token_id, one.logprobs.chosen)):
            found.setdefault(_shown(self._tokens.of(token_id)), value)
        return found


def _shown(spelt: bytes) -> str:
    """A token as text: bytes that are no whole character as ``\\xe2\\x82``, which is OpenAI's way."""
    return spelt.decode(errors="backslashreplace")
