"""The ``logprobs`` of a reply in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from torchrelay.gateway.inference.core import TokenLogprobs
from torchrelay.gateway.inference.text.token_bytes import TokenBytes

_MAX_ENTRIES: Final = 2048  # kept of one request


class LogprobEntry(NamedTuple):
    """A token of a reply with its logprobs; ``offset`` is its start in the choice's text, in characters."""

    token_id: int
    logprobs: TokenLogprobs
    offset: int


class LogprobFormatter:
    """The ``logprobs`` of a choice or chunk, in the format of its path. One per request.

    A token of a chat comes with up to 20 others, and most of them come again: what does not change of a token's entry
    is encoded once.
    """

    def __init__(self, tokens: TokenBytes, is_chat: bool) -> None:
        self._tokens = tokens
        self._is_chat = is_chat
        self._entries: dict[int, bytes] = {}  # by token id: a chat's entry without its logprob

    def of(self, entries: Sequence[LogprobEntry]) -> msgspec.Raw | dict[str, Any]:
        return msgspec.Raw(self._chat(entries)) if self._is_chat else self._completion(entries)

    def _chat(self, entries: Sequence[LogprobEntry]) -> bytes:
        content = [
            b'%s,"top_logprobs":[%s]}'
            % (
                self._entry(entry.token_id, entry.logprobs.chosen),
                b",".join([self._entry(token_id, value) + b"}" for token_id, value in entry.logprobs.top]),
            )
            for entry in entries
        ]
        return b'{"content":[%s],"refusal":null}' % b",".join(content)

    def _entry(self, token_id: int, value: float) -> bytes:
        """The JSON of an entry, without its closing brace."""
        encoded_entry = self._entries.get(token_id)
        if encoded_entry is None:
            if len(self._entries) >= _MAX_ENTRIES:
                self._entries.clear()
            token = self._tokens.of(token_id)
            encoded = msgspec.json.encode({"token": _text(token), "bytes": list(token)})
            encoded_entry = self._entries[token_id] = encoded[:-1] + b',"logprob":'
        return encoded_entry + msgspec.json.encode(value)

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
