"""Incremental detokenization of one choice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torchrelay.common.tokens.stop_strings import StopTrimmer
from torchrelay.common.tokens.text_stream import TextStream
from torchrelay.common.tokens.token_decoder import TokenDecoder


class PlacedToken(NamedTuple):
    """A token's part in the text of its choice.

    The ``encoded`` of all tokens join to the text in UTF-8, as far as it is valid; empty for a token without text.
    ``offset`` is the character in which the token begins.
    """

    shown: str  # the text that can be shown after the token
    encoded: bytes
    offset: int


class ChoiceDetokenizer:
    """Turns accepted tokens into text that ends before a stop string, and before a token that ends the answer."""

    __slots__ = ("_begun", "_ends", "_num_chars", "_stops", "_stream")

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
        self._num_chars = 0  # of the stream's text
        self._begun = b""  # what placed tokens have of the stream's next text

    def step(self, token_id: int) -> str:
        """The text that can be shown after ``token_id``."""
        piece = "" if token_id in self._ends else self._stream.step(token_id)
        return piece if self._stops is None else self._stops.push(piece)

    def step_placed(self, token_id: int, encoded: bytes) -> PlacedToken:
        """``step``, with the token's part in the text; ``encoded`` is what the token has on its own. Not to be mixed
        with ``step``.
        """
        begun, offset = self._begun, self._num_chars + len(self._begun.decode(errors="ignore"))
        piece = "" if token_id in self._ends else self._stream.step(token_id)
        self._num_chars += len(piece)
        if token_id in self._ends or (not piece and not self._stream.held_text.endswith("\ufffd")):
            encoded = b""  # no text, or not before the next token
        elif piece and "\ufffd" not in piece and piece.encode().startswith(begun):
            encoded = piece.encode()[len(begun) :]
        self._begun = b"" if piece else begun + encoded
        return PlacedToken(piece if self._stops is None else self._stops.push(piece), encoded, offset)

    @property
    def stop_string(self) -> str:
        """The stop string that ended the text; empty if none has."""
        return "" if self._stops is None else self._stops.matched

    def flush(self) -> str:
        """The remaining text, once the choice is over."""
        rest = self._stream.flush()
        return rest if self._stops is None else self._stops.push(rest) + self._stops.flush()
