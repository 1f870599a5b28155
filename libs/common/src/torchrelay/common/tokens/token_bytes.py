"""The bytes that each token of a vocabulary stands for."""

from __future__ import annotations

import re
from typing import Any, Final

from torchrelay.common.tokens.token_decoder import TokenDecoder

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable bytes map to themselves, the others to characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET: Final = _byte_alphabet()


class TokenBytes:
    """The bytes of each token of a vocabulary; a token may be part of a character.

    The tokenizers library decodes texts, not single tokens; this derives the spelling of tokens from its decoder.
    """

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        kinds = {step["type"] for step in decoder.steps}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        self._replaced = [spelling for step in decoder.steps for spelling in _spellings(step)]

    def in_text(self, token_id: int) -> bytes:
        """The token's part of a text: empty for special tokens, which have none."""
        return b"" if self._decoder.shown(token_id) is None else self.of(token_id)

    def of(self, token_id: int) -> bytes:
        """The token's bytes; empty for an id unknown to the tokenizer, since models may have more."""
        added = self._decoder.declared(token_id)
        if added is not None:
            return added.encode()
        token = self._decoder.spelling(token_id)
        if token is None:
            return b""
        if self._has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        if self._is_byte_level and all(letter in _ALPHABET for letter in token):
            return bytes(_ALPHABET[letter] for letter in token)
        for spelling, text in self._replaced:
            token = token.replace(spelling, text)
        return token.encode(errors="replace")


def _spellings(step: dict[str, Any]) -> list[tuple[str, str]]:
    """(spelling in tokens, text) pairs of a decoder step, mostly for spaces."""
    match step:
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
            return [(pattern, content)]
        case {"type": "Metaspace", "replacement": str(replacement)}:
            return [(replacement, " ")]
        case {"type": "BPEDecoder", "suffix": str(suffix)}:
            return [(suffix, " ")]
    return []
