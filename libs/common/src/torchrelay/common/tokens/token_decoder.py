"""Token ids into text, with little memory."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence, Set
from typing import Any, Final

import msgspec
from tokenizers.decoders import Decoder

_IDS_PER_SORT: Final = 1 << 13


class SpellingTable:
    """Texts by id: one block of bytes in the order of the ids, which may be far apart. A dict takes ten times that."""

    def __init__(self, texts: dict[int, str]) -> None:
        """Empties ``texts``."""
        self._ids = array("I", _sorted(list(texts)))
        self._ends = array("I", [0])
        joined = bytearray()
        for token_id in self._ids:
            joined += texts.pop(token_id).encode()
            self._ends.append(len(joined))
        self._joined = bytes(joined)
        self.num_bytes = sum(map(sys.getsizeof, (self._ids, self._ends, self._joined)))

    @property
    def end_id(self) -> int:
        """The number after the highest id."""
        return self._ids[-1] + 1 if self._ids else 0

    def get(self, token_id: int) -> str | None:
        ids, index = self._ids, token_id
        if not 0 <= index < len(ids) or ids[index] != token_id:  # ids below it are missing
            index = bisect_left(ids, token_id)
            if index == len(ids) or ids[index] != token_id:
                return None
        return self._joined[self._ends[index] : self._ends[index + 1]].decode()


def _sorted(ids: list[int]) -> list[int]:
    """Sorts in slices, then merges them: sorting half a million ids in a single call holds the interpreter too long."""
    if len(ids) <= _IDS_PER_SORT:
        return sorted(ids)
    middle = len(ids) // 2
    return sorted(_sorted(ids[:middle]) + _sorted(ids[middle:]))


class TokenDecoder:
    """Decodes as the tokenizer does whose tokens and decoder it has; ids without a token have no text.

    ``spelling`` is a token as the decoder gets it, ``declared`` what an added token is called in the file, whose
    spelling a normalizer may have changed; None for other ids.
    """

    def __init__(
        self, tokens: Iterable[tuple[str, int]], declared: dict[int, str], special: Set[str], decoder: Decoder | None
    ) -> None:
        """The last of ``tokens`` with the same id counts. Empties ``declared``. ``special``: spellings without text."""
        spellings = SpellingTable({token_id: token for token, token_id in tokens})
        added = SpellingTable(declared)
        self.spelling = spellings.get
        self.num_ids = spellings.end_id  # all ids are below it
        self.declared = added.get
        self._special = special = special - {""}  # the library declares no empty token
        self._decoder = decoder
        # Whether a text that is cut between two characters is that of its two parts: bytes of tokens are bytes of text.
        self.is_concatenative = [step["type"] for step in self.steps] == ["ByteLevel"]
        self.num_bytes = spellings.num_bytes + added.num_bytes + sum(map(sys.getsizeof, (special, *special)))

    def shown(self, token_id: int) -> str | None:
        """The spelling, except of special tokens."""
        spelling = self.spelling(token_id)
        return None if spelling in self._special else spelling

    def text(self, spellings: Sequence[str]) -> str:
        """The text of these tokens together. Raises any error of the library's decoder, panics included."""
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
