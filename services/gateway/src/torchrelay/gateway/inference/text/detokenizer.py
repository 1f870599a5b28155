"""Incremental detokenization of one choice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
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

    __slots__ = (
        "_begun",
        "_decoder",
        "_ends",
        "_held_markers",
        "_markers",
        "_num_chars",
        "_num_shown",
        "_num_unsearched",
        "_stops",
        "_stream",
    )

    def __init__(
        self,
        decoder: TokenDecoder,
        prompt_end: Iterable[int],
        stop_strings: Sequence[str],
        stop_token_ids: Iterable[int],
        min_tokens: int = 0,
        markers: Set[str] = frozenset(),
    ) -> None:
        """``markers``: special tokens that the shown text has, although the text that ``stop_strings`` end has not."""
        self._decoder, self._markers = decoder, markers
        self._held_markers: list[tuple[int, str]] = []  # (characters of text before it, marker)
        self._num_shown = 0  # characters of text
        self._ends = frozenset(stop_token_ids)
        self._stream = TextStream(decoder, prompt_end)
        self._stops = StopTrimmer(stop_strings) if stop_strings else None
        self._num_unsearched = min_tokens if stop_strings else 0  # tokens to come whose text is not searched
        self._num_chars = 0  # of the stream's text
        self._begun = b""  # what placed tokens have of the stream's next text

    def step(self, token_id: int) -> str:
        """The text that can be shown after ``token_id``."""
        piece = "" if token_id in self._ends else self._stream.step(token_id)
        shown = self._before_stop(piece)
        if not self._markers:
            return shown
        self._num_chars += len(piece)
        return self._with_markers(token_id, shown)

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
        shown = self._before_stop(piece)
        return PlacedToken(self._with_markers(token_id, shown) if self._markers else shown, encoded, offset)

    def _before_stop(self, piece: str) -> str:
        """The text that can be shown after a token that completes ``piece``, without markers."""
        if self._num_unsearched > 0:
            self._num_unsearched -= 1
            return piece
        return piece if self._stops is None else self._stops.push(piece)

    def _with_markers(self, token_id: int, shown: str) -> str:
        """``shown`` after ``token_id``, with the markers within it."""
        if token_id not in self._ends and self._decoder.shown(token_id) is None:
            spelling = self._decoder.spelling(token_id)
            if spelling is not None and spelling in self._markers:
                self._held_markers.append((self._num_chars, spelling))
        if not self._held_markers:
            self._num_shown += len(shown)
            return shown
        return self._spliced(shown)

    def _spliced(self, shown: str) -> str:
        pieces: list[str] = []
        end = self._num_shown + len(shown)
        while self._held_markers and self._held_markers[0][0] <= end:
            place, marker = self._held_markers.pop(0)
            num_before = max(0, place - self._num_shown)
            pieces += shown[:num_before], marker
            shown, self._num_shown = shown[num_before:], self._num_shown + num_before
        self._num_shown += len(shown)
        return "".join([*pieces, shown])

    @property
    def stop_string(self) -> str:
        """The stop string that ended the text; empty if none has."""
        return "" if self._stops is None else self._stops.matched

    def flush(self) -> str:
        """The remaining text, once the choice is over."""
        rest = self._stream.flush()
        shown = rest if self._stops is None else self._stops.push(rest) + self._stops.flush()
        return self._spliced(shown) if self._held_markers else shown
