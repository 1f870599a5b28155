"""The bytes that each token of a vocabulary stands for."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

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
