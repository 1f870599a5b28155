"""The ``logprobs`` of a reply in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec

from torchrelay.common.tokens.token_bytes import TokenBytes
from torchrelay.gateway.inference.core import TokenLogprobs

EncodedLogprobs: TypeAlias = tuple[bytes, ...]  # of a token: the JSON of its item in each list of the format
_MAX_ENTRIES: Final = 2048  # kept of one request
_OF_CHAT: Final = ("content",)
_OF_COMPLETION: Final = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class LogprobEntry(NamedTuple):
    """A token of a reply with its logprobs.

    ``encoded`` are its bytes in the choice's text, ``offset`` is the character of that text in which it begins.
    """

    token_id: int
    logprobs: TokenLogprobs
    encoded: bytes
    offset: int


class LogprobFormatter:
    """The ``logprobs`` of a choice or chunk, in the format of its path. One per request.

    Each token is encoded as it comes, which takes half of the memory, and leaves little to do at the end of an answer.
    A token of a chat comes with up to 20 others, and most of them come again: what does not change of a token's entry
    is encoded once.
    """

    def __init__(self, tokens: TokenBytes, is_chat: bool) -> None:
        self._tokens = tokens
        self._is_chat = is_chat
        self._entries: dict[int, bytes] = {}  # by token id: a chat's entry without its logprob

    def of(self, tokens: Sequence[EncodedLogprobs], prompt: EncodedLogprobs = ()) -> msgspec.Raw:
        """The object of the tokens, behind the items of a prompt's tokens in each list."""
        names = _OF_CHAT if self._is_chat else _OF_COMPLETION
        columns = zip(*tokens, strict=True) if tokens else [()] * len(names)
        parts: list[bytes] = []
        for name, first, items in zip(names, prompt or [b""] * len(names), columns, strict=True):
            joined = b",".join([first, *items] if first else items)
            parts += b'%s"%s":[' % (b"," if parts else b"{", name.encode()), joined, b"]"
        return msgspec.Raw(b"".join([*parts, b',"refusal":null}' if self._is_chat else b"}"]))

    def encoded(self, entry: LogprobEntry) -> EncodedLogprobs:
        """The items of a token."""
        if not self._is_chat:
            encode = msgspec.json.encode
            top = encode(self._top(entry))
            return encode(self._name(entry)), encode(entry.logprobs.chosen), top, encode(entry.offset)
        top = b",".join([self._entry(token_id, value) + b"}" for token_id, value in entry.logprobs.top])
        return (b'%s,"top_logprobs":[%s]}' % (self._chosen(entry), top),)

    def _chosen(self, entry: LogprobEntry) -> bytes:
        """The JSON of a reply's token, without its closing brace."""
        if entry.encoded == self._tokens.in_text(entry.token_id):
            return self._entry(entry.token_id, entry.logprobs.chosen)
        return _head(self._name(entry), entry.encoded) + msgspec.json.encode(entry.logprobs.chosen)

    def _entry(self, token_id: int, value: float) -> bytes:
        """The JSON of a token that could be in a reply, without its closing brace."""
        head = self._entries.get(token_id)
        if head is None:
            if len(self._entries) >= _MAX_ENTRIES:
                self._entries.clear()
            head = _head(token_text(self._tokens.of(token_id)), self._tokens.in_text(token_id))
            self._entries[token_id] = head
        return head + msgspec.json.encode(value)

    def _name(self, entry: LogprobEntry) -> str:
        return token_text(entry.encoded or self._tokens.of(entry.token_id))

    def _top(self, entry: LogprobEntry) -> dict[str, float]:
        """The most likely tokens, and the chosen one. Among tokens with equal text the most likely wins."""
        top: dict[str, float] = {}
        for token_id, value in (*entry.logprobs.top, (entry.token_id, entry.logprobs.chosen)):
            name = self._name(entry) if token_id == entry.token_id else token_text(self._tokens.of(token_id))
            top.setdefault(name, value)
        return top


def _head(name: str, encoded: bytes) -> bytes:
    """The JSON of a token up to its logprob. ``bytes`` is null for a token without text."""
    fields = {"token": name, "bytes": list(encoded) or None}
    return msgspec.json.encode(fields)[:-1] + b',"logprob":'


def token_text(token: bytes) -> str:
    """A token as text, with incomplete characters escaped as ``\\xe2\\x82``, like OpenAI."""
    return token.decode(errors="backslashreplace")
