"""Logarithms of probabilities as the doors show them, and the bytes that tokens stand for. Only for who asks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
from tokenizers import Tokenizer

from torchrelay.gateway.inference.core import TokenLogprobs

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others for letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET: Final = _byte_alphabet()


class TokenBytes:
    """What each token of a vocabulary stands for, in bytes: one token may be a part of a character.

    The tokenizers library decodes texts, not tokens; so this reads from its decoder how tokens are spelt.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()}
        decoders = _decoders(tokenizer)
        kinds = {decoder["type"] for decoder in decoders}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        self._replaced = [spelling for decoder in decoders for spelling in _spellings(decoder)]

    def of(self, token_id: int) -> bytes:
        """Empty for an id that the tokenizer does not know: models may have more."""
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        spelt: str | None = self._tokenizer.id_to_token(token_id)
        if spelt is None:
            return b""
        if self._has_byte_tokens and (found := _BYTE_TOKEN.fullmatch(spelt)):
            return bytes.fromhex(found[1])
        if self._is_byte_level and all(letter in _ALPHABET for letter in spelt):
            return bytes(_ALPHABET[letter] for letter in spelt)
        for spelling, meant in self._replaced:
            spelt = spelt.replace(spelling, meant)
        return spelt.encode(errors="replace")


def _decoders(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The tokenizer's decoder as the list of steps that it is."""
    if tokenizer.decoder is None:
        return []
    decoder: dict[str, Any] = msgspec.json.decode(tokenizer.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    return steps


def _spellings(decoder: dict[str, Any]) -> list[tuple[str, str]]:
    """What stands for what in the tokens: for a space, mostly."""
    match decoder:
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
            return [(pattern, content)]
        case {"type": "Metaspace", "replacement": str(replacement)}:
            return [(replacement, " ")]
        case {"type": "BPEDecoder", "suffix": str(suffix)}:
            return [(suffix, " ")]
    return []


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
