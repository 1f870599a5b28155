"""Grammars that bound the text of an answer, read by llguidance: Lark with ``%json`` and regular expressions.

A tenant writes them, so every part of their work has a limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.tokens.token_bytes import TokenBytes
from torchrelay.common.tokens.token_decoder import TokenDecoder

MAX_GRAMMAR_CHARS: Final = 1 << 19  # it travels with its prompt, in a message of 8 MB
_MAX_ERROR_CHARS: Final = 300
_PATTERN_FAULT: Final = re.compile(r"^error: (.*)$", re.MULTILINE)
_OPTIONS: Final = re.compile(r"^\s*%llguidance", re.MULTILINE)  # JSON and patterns have no line ends of their own
# Of llguidance's defaults, the fuel of a step would allow 14 ms for each token, the states 500 MB, and the size, whose
# square a step may take, half a second: an object has eight symbols per optional property, four per required one.
_LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    max_lexer_states=50_000,
    max_grammar_size=20_000,
    verbose_errors=False,
)

# Otherwise text that a grammar forces would be allowed in a single division into tokens, which llguidance asks of a
# tokenizer; the model shall choose it.
_UNFORCED: Final = '\n%llguidance {"no_forcing": true}\n'


def grammar_error(grammar: str) -> str:
    """The reason why a grammar is unusable; empty if it can be used. Takes milliseconds."""
    if len(grammar) > MAX_GRAMMAR_CHARS:
        return f"it has {len(grammar):,} characters; at most {MAX_GRAMMAR_CHARS:,} are allowed"
    if _OPTIONS.search(grammar):
        return "%llguidance is not supported: the platform sets the options of grammars"
    return _first_line(LLMatcher.validate_grammar(grammar + _UNFORCED, limits=_LIMITS))


class GrammarState:
    """The state of a grammar after some output."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str:
        """The limit that the grammar has exceeded, or the output that it does not allow; empty if all is well."""
        return _first_line(self._matcher.get_error())

    def allowed(self) -> bytes:
        """The mask of the next token: bit ``i % 8`` of byte ``i // 8`` is set if token ``i`` may follow.

        The bit after that of the last token tells whether the output may end.
        """
        return self._matcher.compute_bitmask()

    def advance(self, token_id: int) -> None:
        """Appends a token."""
        self._matcher.consume_token(token_id)


class Grammar:
    """A compiled grammar for the tokens of a model."""

    def __init__(self, matcher: LLMatcher, end_id: int) -> None:
        self._matcher = matcher
        self.end_id = end_id  # the number of tokens

    def start(self, output: Sequence[int] = ()) -> GrammarState:
        """The state after ``output``."""
        matcher = self._matcher.deep_copy()
        if output:
            matcher.consume_tokens(list(output))
        return GrammarState(matcher)


class GrammarCompiler:
    """Compiles grammars for the tokens of a model. Its construction takes about a second for 150,000 tokens."""

    def __init__(self, decoder: TokenDecoder) -> None:
        self.decoder = decoder
        self._vocabulary = _Vocabulary(decoder)
        # In two parts, because each holds the interpreter: for most of a second with 150,000 tokens.
        bare = LLTokenizer(TokenizerWrapper(self._vocabulary), slices=[])
        self._tokenizer = bare.with_slices(LLTokenizer.general_slices())

    def compile(self, grammar: str) -> Grammar:
        """Raises ``InvalidRequest``."""
        matcher = LLMatcher(self._tokenizer, grammar + _UNFORCED, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise InvalidRequest(f"the grammar cannot be used: {_first_line(matcher.get_error())}", field="grammar")
        return Grammar(matcher, self._vocabulary.eos_token_id)


class _Vocabulary:
    """The vocabulary as llguidance reads it. Special tokens have no text: a grammar allows those that it names by id.

    Its end of sequence is a token of its own after all others: which tokens end an answer differs by request.
    """

    bos_token_id = None

    def __init__(self, decoder: TokenDecoder) -> None:
        token_bytes = TokenBytes(decoder)
        self.eos_token_id = decoder.num_ids
        self.tokens = [token_bytes.in_text(i) or self._special(decoder, i) for i in range(decoder.num_ids)]
        self.tokens.append(b"\xff<end>")
        self.special_token_ids = [i for i, encoded in enumerate(self.tokens) if encoded.startswith(b"\xff")]

    @staticmethod
    def _special(decoder: TokenDecoder, token_id: int) -> bytes:
        spelling = decoder.spelling(token_id)
        return b"" if spelling is None else b"\xff" + spelling.encode()

    def __call__(self, text: bytes) -> Iterable[int]:
        """The tokens of a text that a grammar forces; see ``_UNFORCED``."""
        return []


def _first_line(message: str) -> str:
    """The first line; of a faulty pattern, which is shown on several lines, also the fault."""
    first, _, rest = message.strip().partition("\n")
    fault = _PATTERN_FAULT.search(rest)
    return (f"{first} {fault[1]}" if fault and first.endswith(":") else first)[:_MAX_ERROR_CHARS]
