"""Token ids into text, incrementally."""

from __future__ import annotations

from torchrelay.common.errors import TorchrelayError
from torchrelay.common.tokens.token_decoder import TokenDecoder

# A UTF-8 character is at most four single-byte tokens; a stream that holds more is stuck on invalid bytes, and would
# decode all of them at every step.
MAX_HELD_TOKENS = 16
MAX_HELD_CHARS = 256  # of these tokens' spellings


class TextStream:
    """Decodes one choice token by token; special tokens have no text.

    ``step`` and ``flush`` raise ``TorchrelayError`` for tokens that the model's decoder cannot decode.
    """

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._shown: list[str] = []  # spellings of the last piece, on which the next one's spacing depends
        self._shown_text = ""
        self._held: list[str] = []

    def step(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty while a character is incomplete."""
        spelling = self._decoder.shown(token_id)
        if spelling is None:
            return ""
        held, before = self._held, self._shown_text
        held.append(spelling)
        after = self._text(self._shown + held)
        if len(after) <= len(before) or after.endswith("\ufffd"):
            is_stuck = len(held) >= MAX_HELD_TOKENS or sum(map(len, held)) >= MAX_HELD_CHARS
            return self.flush() if is_stuck else ""
        if not after.startswith(before):
            return self.flush()
        self._show()
        return after[len(before) :]

    def flush(self) -> str:
        """The held text, incomplete characters as U+FFFD. The stream can continue."""
        if not self._held:
            return ""
        before, after = self._shown_text, self._text(self._shown + self._held)
        if not after.endswith("\ufffd") and after != before:
            self._show()
        self._held = []
        return after[len(before) :] if after.startswith(before) else after

    def _show(self) -> None:
        shown, self._held = self._held, []
        if not self._decoder.is_concatenative:
            self._shown, self._shown_text = shown, self._text(shown)

    def _text(self, spellings: list[str]) -> str:
        try:
            return self._decoder.text(spellings)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # decoders are the tenant's, and some panic
            message = "the model's tokenizer failed to decode its tokens; the answer cannot go on"
            raise TorchrelayError(message, field="model") from error
