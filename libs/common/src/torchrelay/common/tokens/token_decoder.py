"""Token ids into text, with little memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import accumulate
from typing import Any

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import Decoder


class TokenDecoder:
    """Decodes as the tokenizer does whose tokens and decoder it has; ids without a token have no text.

    The spellings are one block of bytes: the library takes fifteen times as much for them.
    """

    def __init__(
        self,
        tokens: Iterable[tuple[str, int]],
        num_tokens: int,
        declared: Mapping[int, str],
        special: Set[str],
        decoder: Decoder | None,
    ) -> None:
        """Of ``tokens`` with the same id the last counts. ``declared``: what added tokens are called in the file, whose
        spellings a normalizer may have changed. ``special``: spellings without text.
        """
        spelt = [b""] * (2 * num_tokens)
        self._others: dict[int, str] = {}  # the empty token, and those with ids far beyond the others
        for token, token_id in tokens:
            if token and token_id < len(spelt):
                spelt[token_id] = token.encode()
                self._others.pop(token_id, None)
            else:
                self._others[token_id] = token
        while spelt and not spelt[-1]:
            del spelt[-1]
        self._ends = array("I", accumulate(map(len, spelt), initial=0))
        self._spelt = b"".join(spelt)
        self._special = special
        self._decoder = decoder
        self.declared = declared
        # Whether a text that is cut between two characters is that of its two parts: bytes of tokens are bytes of text.
        self.is_concatenative = [step["type"] for step in self.steps] == ["ByteLevel"]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenDecoder:
        """That of a loaded tokenizer."""
        declared = tokenizer.get_added_tokens_decoder()
        ids = {*range(tokenizer.get_vocab_size()), *tokenizer.get_vocab().values(), *declared}
        named = ((tokenizer.id_to_token(token_id), token_id) for token_id in ids)
        tokens = [(token, token_id) for token, token_id in named if token is not None]
        special = {token.content for token in declared.values() if token.special}
        contents = {token_id: token.content for token_id, token in declared.items()}
        return cls(tokens, len(tokens), contents, special, tokenizer.decoder)

    def spelling(self, token_id: int) -> str | None:
        """The token as the decoder gets it; None for an id without a token."""
        other = self._others.get(token_id)
        if other is not None:
            return other
        if not 0 <= token_id < len(self._ends) - 1:
            return None
        return self._spelt[self._ends[token_id] : self._ends[token_id + 1]].decode() or None

    def shown(self, token_id: int) -> str | None:
        """The spelling, except of special tokens."""
        spelling = self.spelling(token_id)
        return None if spelling in self._special else spelling

    def text(self, spellings: Sequence[str]) -> str:
        """What these tokens say together. Raises whatever the library's decoder does, panics included."""
        return " ".join(spellings) if self._decoder is None else self._decoder.decode(spellings)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of these tokens. Raises as ``text``."""
        spelling = self.shown if skip_special_tokens else self.spelling
        return self.text([token for token in map(spelling, token_ids) if token is not None])

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The steps of the decoder, as in the JSON of the file."""
        if self._decoder is None:
            return []
        decoder: dict[str, Any] = msgspec.json.decode(self._decoder.__getstate__())
        steps: list[dict[str, Any]] = decoder.get("decoders", [decoder])
        return steps
