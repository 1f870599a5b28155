"""The text of one choice as its reader sees it."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from torchrelay.common.tokens.stop_strings import StopTrimmer
from torchrelay.common.tokens.text_stream import TextStream


class ChoiceDetokenizer:
    """Turns accepted tokens into text that ends before a stop string."""

    __slots__ = ("_num_chars", "_stops", "_stream")

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str]) -> None:
        self._stream = TextStream(tokenizer)
        self._stops = StopTrimmer(stop_strings) if stop_strings else None
        self._num_chars = 0

    def step(self, token_id: int) -> str:
        """The text that may be shown once ``token_id`` is there."""
        piece = self._stream.step(token_id)
        return piece if self._stops is None else self._stops.push(piece)

    def step_placed(self, token_id: int) -> tuple[str, int]:
        """The same, and at which character of the whole text the token begins; all steps must be of this kind."""
        offset, piece = self._num_chars, self._stream.step(token_id)
        self._num_chars += len(piece)
        return piece if self._stops is None else self._stops.push(piece), offset

    def flush(self) -> str:
        """The rest, when the choice is over."""
        rest = self._stream.flush()
        return rest if self._stops is None else self._stops.push(rest) + self._stops.flush()
