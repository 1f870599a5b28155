"""Token ids into text, incrementally."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# A UTF-8 character takes at most four tokens of one byte; a stream that holds back more is stuck on invalid bytes, and
# would decode all it holds at every step.
MAX_HELD_TOKENS = 16


class TextStream:
    """The text of one choice, token by token; special tokens have none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._shown: list[int] = []  # tokens of the last piece: what the next piece's spacing depends on
        self._held: list[int] = []

    def step(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty while a character is unfinished."""
        self._held.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except (KeyboardInterrupt, SystemExit):
            raise
        except (
            BaseException
        ):  # when a piece changes what was shown before it. NOTE: a panic of the library is no Exception
            return self.flush()
        if piece is None:
            return self.flush() if len(self._held) >= MAX_HELD_TOKENS else ""
        self._shown, self._held = self._held, []
        return piece

    def flush(self) -> str:
        """The text held back, unfinished characters as U+FFFD. The stream can go on."""
        if not self._held:
            return ""
        before = self._tokenizer.decode(self._shown, skip_special_tokens=True)
        after = self._tokenizer.decode(self._shown + self._held, skip_special_tokens=True)
        if not after.endswith("\ufffd") and after != before:
            self._shown = self._held
        self._held = []
        self._stream = DecodeStream(ids=self._shown, skip_special_tokens=True)
        return after[len(before) :] if after.startswith(before) else after
