"""Token ids into text, incrementally."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# A UTF-8 character is at most four single-byte tokens; a stream that holds more is stuck on invalid bytes, and would
# decode all of them at every step.
MAX_HELD_TOKENS = 16


class TextStream:
    """Decodes one choice token by token; special tokens have no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._shown: list[int] = []  # tokens of the last piece, on which the next one's spacing depends
        self._held: list[int] = []

    def step(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty while a character is incomplete."""
        self._held.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a piece changed earlier text. NOTE: a panic of the library is not an ``Exception``
            return self.flush()
        if piece is None:
            return self.flush() if len(self._held) >= MAX_HELD_TOKENS else ""
        self._shown, self._held = self._held, []
        return piece

    def flush(self) -> str:
        """The held text, incomplete characters as U+FFFD. The stream can continue."""
        if not self._held:
            return ""
        before = self._tokenizer.decode(self._shown, skip_special_tokens=True)
        after = self._tokenizer.decode(self._shown + self._held, skip_special_tokens=True)
        if not after.endswith("\ufffd") and after != before:
            self._shown = self._held
        self._held = []
        self._stream = DecodeStream(ids=self._shown, skip_special_tokens=True)
        return after[len(before) :] if after.startswith(before) else after
