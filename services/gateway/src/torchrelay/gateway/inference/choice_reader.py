"""The answer of a choice: from tokens to text, and from text to parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from torchrelay.common.tokens.token_bytes import TokenBytes
from torchrelay.gateway.inference.answers.answer_parser import AnswerParser
from torchrelay.gateway.inference.answers.parts import Part
from torchrelay.gateway.inference.core import LogprobDelta, TokenDelta, TokenLogprobs
from torchrelay.gateway.inference.text.detokenizer import ChoiceDetokenizer, PlacedToken


class ScoredToken(NamedTuple):
    """A token of a request with logprobs."""

    token_id: int
    logprobs: TokenLogprobs
    placed: PlacedToken  # in the text


class Step(msgspec.Struct, frozen=True, gc=False):
    """The parts that a token completes, none of which is empty, or those that the end of the answer completes."""

    parts: Sequence[Part]
    token_id: int | None  # None: the end
    scored: ScoredToken | None = None

    @property
    def content(self) -> str:
        parts = self.parts
        if len(parts) == 1 and isinstance(parts[0], str):
            return parts[0]
        return "".join([part for part in parts if isinstance(part, str)])


class ChoiceReader:
    """Reads the tokens of a choice, once. ``parser``: divides the text; None: the text is all content. ``tokens``: of
    a request with logprobs.
    """

    __slots__ = ("_parser", "_text", "_tokens")

    def __init__(self, text: ChoiceDetokenizer, parser: AnswerParser | None, tokens: TokenBytes | None) -> None:
        self._text, self._parser, self._tokens = text, parser, tokens

    @property
    def is_divided(self) -> bool:
        """Whether the answer may have other parts than content."""
        return self._parser is not None

    @property
    def num_calls(self) -> int:
        return 0 if self._parser is None else self._parser.num_calls

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._parser is None else self._parser.num_reasoning_tokens

    @property
    def stop_string(self) -> str:
        """The stop string that ended the text; empty if none has."""
        return self._text.stop_string

    def read(self, delta: TokenDelta) -> list[Step]:
        """The step of each token, and of the end if the answer ends."""
        if self._tokens is not None:
            steps = [self._scored(*pair, self._tokens) for pair in LogprobDelta.pairs(delta)]
        elif self._parser is not None:
            steps = [Step(self._parts(self._text.step(token_id)), token_id) for token_id in delta.token_ids]
        else:  # without a further call per token
            step = self._text.step
            steps = [Step((text,) if (text := step(token_id)) else (), token_id) for token_id in delta.token_ids]
        if delta.finish is not None:
            text = self._text.flush()
            parts = self._parts(text) if text else ()
            steps.append(Step(parts if self._parser is None else (*parts, *self._parser.flush()), None))
        return steps

    def _scored(self, token_id: int, logprobs: TokenLogprobs, tokens: TokenBytes) -> Step:
        placed = self._text.step_placed(token_id, tokens.in_text(token_id))
        return Step(self._parts(placed.shown), token_id, ScoredToken(token_id, logprobs, placed))

    def _parts(self, text: str) -> Sequence[Part]:
        """The parts that the text of a token completes; a parser counts a token without text, too."""
        if self._parser is not None:
            return self._parser.push(text)
        return (text,) if text else ()
