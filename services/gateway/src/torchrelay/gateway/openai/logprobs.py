"""The ``logprobs`` of a reply in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torchrelay.gateway.inference.core import TokenLogprobs
from torchrelay.gateway.inference.text.token_bytes import TokenBytes


class LogprobEntry(NamedTuple):
    """One token of a reply with its logprobs; ``offset`` is its start in the choice's text, in characters."""

    token_id: int
    logprobs: TokenLogprobs
    offset: int


class LogprobFormatter:
    """The ``logprobs`` of a choice or chunk, in the format of its path."""

    def __init__(self, tokens: TokenBytes, is_chat: bool) -> None:
        self._tokens = tokens
        self._is_chat = is_chat

    def of(self, entries: Sequence[LogprobEntry]) -> dict[str, Any]:
        return self._chat(entries) if self._is_chat else self._completion(entries)

    def _chat(self, entries: Sequence[LogprobEntry]) -> dict[str, Any]:
        content = [
            self._entry(entry.token_id, entry.logprobs.chosen)
            | {"top_logprobs": [self._entry(token, value) for token, value in entry.logprobs.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, value: float) -> dict[str, Any]:
        token = self._tokens.of(token_id)
        return {"token": _text(token), "logprob": value, "bytes": list(token)}

    def _completion(self, entries: Sequence[LogprobEntry]) -> dict[str, Any]:
        return {
            "tokens": [_text(self._tokens.of(entry.token_id)) for entry in entries],
            "token_logprobs": [entry.logprobs.chosen for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def _top(self, entry: LogprobEntry) -> dict[str, float]:
        """The most likely tokens, and the chosen one. Among tokens with equal text the most likely wins."""
        top: dict[str, float] = {}
        for token_id, value in (*entry.logprobs.top, (entry.token_id, entry.logprobs.chosen)):
            top.setdefault(_text(self._tokens.of(token_id)), value)
        return top


def _text(token: bytes) -> str:
    """A token as text, with incomplete characters escaped as ``\\xe2\\x82``, like OpenAI."""
    return token.decode(errors="backslashreplace")
