"""The ``logprobs`` of a reply in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from torchrelay.common.tokens.token_bytes import TokenBytes
from torchrelay.gateway.inference.choice_reader import ScoredToken
from torchrelay.gateway.inference.pipeline import RequestSession

EncodedLogprobs: TypeAlias = tuple[bytes, ...]  # of a token: the JSON of its item in each list of the format
_MAX_ENTRIES: Final = 2048  # kept of one request
_OF_CHAT: Final = ("content",)
_OF_COMPLETION: Final = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class LogprobFormatter:
    """The ``logprobs`` of a choice or chunk, in the format of its path. One per request.

    Each token is encoded as it comes, which takes half of the memory, and leaves little to do at the end of an answer.
    A token of a chat comes with up to 20 others, and most of them come again: what does not change of a token's entry
    is encoded once.
    """

    def __init__(self, tokens: TokenBytes, is_chat: bool, num_echoed: int = 0) -> None:
        """``num_echoed``: characters of the prompt before the answer."""
        self._tokens = tokens
        self._is_chat, self._num_echoed = is_chat, num_echoed
        self._entries: dict[int, bytes] = {}  # by token id: a chat's entry without its logprob

    @classmethod
    def for_session(cls, session: RequestSession, *, is_chat: bool) -> LogprobFormatter | None:
        """None for a request without logprobs."""
        return None if session.tokens is None else cls(session.tokens, is_chat, len(session.echo))

    def of(self, tokens: Sequence[EncodedLogprobs], prompt: EncodedLogprobs = ()) -> msgspec.Raw:
        """The object of the tokens, behind the items of a prompt's tokens in each list."""
        names = _OF_CHAT if self._is_chat else _OF_COMPLETION
        columns = zip(*tokens, strict=True) if tokens else [()] * len(names)
        parts: list[bytes] = []
        for name, first, items in zip(names, prompt or [b""] * len(names), columns, strict=True):
            joined = b",".join([first, *items] if first else items)
            parts += b'%s"%s":[' % (b"," if parts else b"{", name.encode()), joined, b"]"
        return msgspec.Raw(b"".join([*parts, b',"refusal":null}' if self._is_chat else b"}"]))

    def encoded(self, token: ScoredToken) -> EncodedLogprobs:
        """The items of a token."""
        if not self._is_chat:
            encode, offset = msgspec.json.encode, self._num_echoed + token.placed.offset
            return encode(self._name(token)), encode(token.logprobs.chosen), encode(self._top(token)), encode(offset)
        top = b",".join([self._entry(token_id, value) + b"}" for token_id, value in token.logprobs.top])
        return (b'%s,"top_logprobs":[%s]}' % (self._chosen(token), top),)

    def _chosen(self, token: ScoredToken) -> bytes:
        """The JSON of a reply's token, without its closing brace."""
        encoded = token.placed.encoded
        if encoded == self._tokens.in_text(token.token_id):
            return self._entry(token.token_id, token.logprobs.chosen)
        return _head(self._name(token), encoded) + msgspec.json.encode(token.logprobs.chosen)

    def _entry(self, token_id: int, value: float) -> bytes:
        """The JSON of a token that could be in a reply, without its closing brace."""
        head = self._entries.get(token_id)
        if head is None:
            if len(self._entries) >= _MAX_ENTRIES:
                self._entries.clear()
            head = _head(token_text(self._tokens.of(token_id)), self._tokens.in_text(token_id))
            self._entries[token_id] = head
        return head + msgspec.json.encode(value)

    def _name(self, token: ScoredToken) -> str:
        return token_text(token.placed.encoded or self._tokens.of(token.token_id))

    def _top(self, token: ScoredToken) -> dict[str, float]:
        """The most likely tokens, and the chosen one. Among tokens with equal text the most likely wins."""
        top: dict[str, float] = {}
        for token_id, value in (*token.logprobs.top, (token.token_id, token.logprobs.chosen)):
            name = self._name(token) if token_id == token.token_id else token_text(self._tokens.of(token_id))
            top.setdefault(name, value)
        return top


def _head(name: str, encoded: bytes) -> bytes:
    """The JSON of a token up to its logprob. ``bytes`` is null for a token without text."""
    fields = {"token": name, "bytes": list(encoded) or None}
    return msgspec.json.encode(fields)[:-1] + b',"logprob":'


def token_text(token: bytes) -> str:
    """A token as text, with incomplete characters escaped as ``\\xe2\\x82``, like OpenAI."""
    return token.decode(errors="backslashreplace")
