"""A circuit breaker: a server that did not answer is asked again after a pause, at first by a single request.

closed: all ask --no answer--> open: nobody asks --after open_s--> one asks
  ^                             ^                                  |    |
  |                             `------------- no answer ----------'    |
  `-------------------------------- an answer --------------------------'
"""

from __future__ import annotations


class Circuit:
    """``may_ask`` before each request; ``answered`` or ``silent`` after each that asked."""

    def __init__(self, open_s: float) -> None:
        self._open_s = open_s
        self._asks_again_at_s: float | None = None  # None: closed

    @property
    def is_closed(self) -> bool:
        return self._asks_again_at_s is None

    def may_ask(self, now_s: float) -> bool:
        if self._asks_again_at_s is None:
            return True
        if now_s < self._asks_again_at_s:
            return False
        self._asks_again_at_s = now_s + self._open_s  # the others wait for the outcome of this one
        return True

    def answered(self) -> None:
        self._asks_again_at_s = None

    def silent(self, now_s: float) -> None:
        self._asks_again_at_s = now_s + self._open_s
