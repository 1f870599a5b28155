"""Token ids into text, incrementally."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, takewhile
from typing import Final

from torchrelay.common.errors import TorchrelayError
from torchrelay.common.tokens.token_decoder import TokenDecoder

# A UTF-8 character is at most four single-byte tokens; a stream that holds more is stuck on invalid bytes, and would
# decode all of them at every step.
MAX_HELD_TOKENS = 16
MAX_HELD_CHARS = 256  # of these tokens' spellings
_MAX_CHARACTER_TOKENS: Final = 4
_MAX_PROMPT_END: Final = 3 * _MAX_CHARACTER_TOKENS  # the end of a character, a whole one, the beginning of another
_SEARCHED_TOKENS: Final = 256  # of a prompt, for tokens with text
_REPLACEMENT: Final = "\ufffd"


def prompt_end(decoder: TokenDecoder, prompt: Sequence[int]) -> tuple[int, ...]:
    """The last tokens of a prompt, on which the text of its answer depends: its first space, and the rest of a
    character that the prompt does not complete. Empty if the model's decoder cannot decode them.
    """
    searched = reversed(prompt[-_SEARCHED_TOKENS:])
    with_text = (token_id for token_id in searched if decoder.shown(token_id) is not None)
    ids = tuple(islice(with_text, _MAX_PROMPT_END))[::-1]
    try:
        stream = TextStream(decoder, ids[_num_cut(decoder, [decoder.shown(token_id) or "" for token_id in ids]) :])
    except TorchrelayError:
        return ()  # the answer may do without these tokens, as the model did not choose them
    return ids[len(ids) - stream.num_context_tokens :]


def prompt_text(decoder: TokenDecoder, prompt: Sequence[int]) -> str:
    """The text of a prompt, without a character that it does not complete: the answer's text has the whole character.

    Raises ``TorchrelayError`` if the model's decoder cannot decode it.
    """
    text = _text(decoder, [spelling for token_id in prompt if (spelling := decoder.shown(token_id)) is not None])
    held = TextStream(decoder, prompt_end(decoder, prompt)).held_text
    return text[: len(text) - (len(held) - len(held.rstrip(_REPLACEMENT)))]


def _num_cut(decoder: TokenDecoder, spellings: Sequence[str]) -> int:
    """The number of tokens that only end a character which tokens before them begin."""
    for begin in range(min(_MAX_CHARACTER_TOKENS, len(spellings))):
        for end in range(begin + 1, begin + 1 + _MAX_CHARACTER_TOKENS):
            if not _text(decoder, spellings[begin:end]).startswith(_REPLACEMENT):
                return begin
    return 0


def _text(decoder: TokenDecoder, spellings: Sequence[str]) -> str:
    try:
        return decoder.text(spellings)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # decoders are the tenant's, and some panic
        message = "the model's tokenizer failed to decode its tokens; the answer cannot go on"
        raise TorchrelayError(message, field="model") from error


class TextStream:
    """Decodes one choice token by token; special tokens have no text.

    The text is that of prompt and answer together, without that of the prompt, whose ``prompt_end`` is enough for this.
    All methods raise ``TorchrelayError`` for tokens that the model's decoder cannot decode.
    """

    def __init__(self, decoder: TokenDecoder, prompt_end: Iterable[int] = ()) -> None:
        self._decoder = decoder
        self._shown: list[str] = []  # spellings of the last piece, on which the next one's spacing depends
        self._shown_text = ""
        self._held: list[str] = []
        self._prompt_text = ""  # of the prompt's last character, while that is incomplete
        for token_id in prompt_end:
            self.step(token_id)
        self._prompt_text = self.held_text

    def step(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty while a character is incomplete."""
        spelling = self._decoder.shown(token_id)
        if spelling is None:
            return ""
        held, before = self._held, self._shown_text
        held.append(spelling)
        after = _text(self._decoder, self._shown + held)
        if len(after) <= len(before) or after.endswith(_REPLACEMENT):
            is_stuck = len(held) >= MAX_HELD_TOKENS or sum(map(len, held)) >= MAX_HELD_CHARS
            return self.flush() if is_stuck else ""
        if not after.startswith(before):
            return self.flush()
        self._show()
        piece = after[len(before) :]
        return self._without_prompt(piece) if self._prompt_text else piece

    @property
    def held_text(self) -> str:
        """The text of the tokens since the last piece of text, incomplete characters as U+FFFD."""
        return self._flushed()[0] if self._held else ""

    @property
    def num_context_tokens(self) -> int:
        """The number of last tokens with text on which the text of the next one depends."""
        return len(self._shown) + len(self._held)

    def flush(self) -> str:
        """The held text, incomplete characters as U+FFFD. The stream can continue."""
        if not self._held:
            return ""
        text, is_next_context = self._flushed()
        if is_next_context:
            self._show()
        self._held = []
        return self._without_prompt(text)

    def _flushed(self) -> tuple[str, bool]:
        """The held text, and whether the spacing of the next piece depends on it."""
        before, after = self._shown_text, _text(self._decoder, self._shown + self._held)
        text = after[len(before) :] if after.startswith(before) else after
        return text, not after.endswith(_REPLACEMENT) and after != before

    def _show(self) -> None:
        shown, self._held = self._held, []
        if not self._decoder.is_concatenative:
            self._shown, self._shown_text = shown, _text(self._decoder, shown)

    def _without_prompt(self, text: str) -> str:
        """The first text, without what the prompt's text has of it already."""
        prompt_text, self._prompt_text = self._prompt_text, ""
        pairs = zip(prompt_text, text, strict=False)
        return text[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) :]
