"""Stop strings, judged by worker and gateway alike.

Both decode the same text in the same way, so they agree on the token that ends a choice: the worker stops computing
(``StopChecker``), the gateway trims the text (``StopTrimmer``). The text of an answer's first ``min_tokens`` tokens is
not searched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchrelay.common.tokens.text_stream import TextStream
from torchrelay.common.tokens.token_decoder import TokenDecoder


class StopChecker:
    """Detects the token that completes a stop string (worker side)."""

    def __init__(
        self, decoder: TokenDecoder, stop_strings: Sequence[str], prompt_end: Iterable[int] = (), min_tokens: int = 0
    ) -> None:
        self._text = TextStream(decoder, prompt_end)
        self._num_unsearched = min_tokens  # tokens to come
        self._stops = tuple(stop_strings)
        self._num_kept_chars = max((len(stop) for stop in self._stops), default=1) - 1
        self._tail = ""
        self._stopped = False

    def step(self, token_id: int) -> bool:
        """True once the text up to and including ``token_id`` contains a stop string."""
        if self._stopped:
            return True
        text = self._text.step(token_id)
        if self._num_unsearched > 0:
            self._num_unsearched -= 1
            return False
        seen = self._tail + text
        self._stopped = any(stop in seen for stop in self._stops)
        self._tail = seen[max(0, len(seen) - self._num_kept_chars) :]
        return self._stopped


class StopTrimmer:
    """Cuts streamed text before the first complete stop string (gateway side).

    Of two that end at the same character the longer counts. A possible beginning of a stop string is held back.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stops = tuple(stop_strings)
        self._max_held = max((len(stop) for stop in self._stops), default=1) - 1
        self._held = ""
        self.matched = ""  # the stop string that ended the text

    def push(self, text: str) -> str:
        """The text that can be shown now; empty once a stop string has ``matched``."""
        if not self._stops or not text:
            return text
        if self.matched:
            return ""
        seen = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := seen.find(stop)) >= 0]
        if ends:
            _, begin, self.matched = min(ends)
            self._held = ""
            return seen[:begin]
        num_held = self._num_held(seen)
        self._held = seen[len(seen) - num_held :]
        return seen[: len(seen) - num_held]

    def flush(self) -> str:
        """The held text, at the end of the stream."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, seen: str) -> int:
        for num_chars in range(min(self._max_held, len(seen)), 0, -1):
            if any(stop.startswith(seen[-num_chars:]) for stop in self._stops):
                return num_chars
        return 0
