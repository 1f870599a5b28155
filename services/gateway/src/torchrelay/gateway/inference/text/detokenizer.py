"""Incremental detokenization of one choice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchrelay.common.tokens.stop_strings import StopTrimmer
from torchrelay.common.tokens.text_stream import TextStream
from torchrelay.common.tokens.token_decoder import TokenDecoder


class ChoiceDetokenizer:
    """Turns accepted tokens into text that ends before a stop string, and before a token that ends the answer."""

    __slots__ = ("_ends", "_num_chars", "_stops", "_stream")

    def __init__(
        self,
        decoder: TokenDecoder,
        prompt_end: Iterable[int],
        stop_strings: Sequence[str],
        stop_token_ids: Iterable[int],
    ) -> None:
        self._ends = frozenset(stop_token_ids)
        self._stream = TextStream(decoder, prompt_end)
        self._stops = StopTrimmer(stop_strings) if stop_strings else None
        self._num_chars = 0

    def step(self, token_id: int) -> str:
        """The text that can be shown after ``token_id``."""
        piece = "" if token_id in self._ends else self._stream.step(token_id)
        return piece if self._stops is None else self._stops.push(piece)

    def step_placed(self, token_id: int) -> tuple[str, int]:
        """``step``, and the character offset at which the token begins. Not to be mixed with ``step``."""
        offset, piece = self._num_chars, "" if token_id in self._ends else self._stream.step(token_id)
        self._num_chars += len(piece)
        return piece if self._stops is None else self._stops.push(piece), offset

    def flush(self) -> str:
        """The remaining text, once the choice is over."""
        rest = self._stream.flush()
        return rest if self._stops is None else self._stops.push(rest) + self._stops.flush()
