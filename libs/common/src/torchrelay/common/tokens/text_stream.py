"""Token ids into text, incrementally."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from torchrelay.common.errors import TorchrelayError

# A UTF-8 character is at most four single-byte tokens; a stream that holds more is stuck on invalid bytes, and would
# decode all of them at every step.
MAX_HELD_TOKENS = 16
MAX_HELD_CHARS = 256  # of these tokens' spellings


class TextStream:
    """Decodes one choice token by token; special tokens have no text.

    ``step`` and ``flush`` raise ``TorchrelayError`` for tokens that the model's decoder cannot decode.
    """

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
            return self.flush() if self._holds_enough() else ""
        self._shown, self._held = self._held, []
        return piece

    def flush(self) -> str:
        """The held text, incomplete characters as U+FFFD. The stream can continue."""
        if not self._held:
            return ""
        before, after = self._decoded(self._shown), self._decoded(self._shown + self._held)
        if not after.endswith("\ufffd") and after != before:
            self._shown = self._held
        self._held = []
        self._stream = DecodeStream(ids=self._shown, skip_special_tokens=True)
        return after[len(before) :] if after.startswith(before) else after

    def _holds_enough(self) -> bool:
        if len(self._held) >= MAX_HELD_TOKENS:
            return True
        return sum(len(self._tokenizer.id_to_token(token_id) or "") for token_id in self._held) >= MAX_HELD_CHARS

    def _decoded(self, token_ids: list[int]) -> str:
        try:
            text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # decoders are the tenant's, and some panic
            message = "the model's tokenizer failed to decode its tokens; the answer cannot go on"
            raise TorchrelayError(message, field="model") from error
        return text
