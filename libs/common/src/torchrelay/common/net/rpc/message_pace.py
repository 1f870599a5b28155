"""How soon the messages of a stream follow each other, where each may carry many entries."""

from __future__ import annotations

import asyncio
from typing import Final

EVERY_S: Final = 0.002
AT_ONCE: Final = 4


class MessagePace:
    """At most one message in ``every_s`` over time: one costs as much as dozens of entries. After a silence ``at_once``
    go at once; entries that follow these closely go together. A token bucket.
    """

    def __init__(self, every_s: float = EVERY_S, at_once: int = AT_ONCE) -> None:
        self._every_s = every_s
        self._ahead_s = (at_once - 1) * every_s
        self._next_at = 0.0  # at an even pace

    async def wait(self) -> None:
        """Waits until the next message may be sent, which the caller then does."""
        clock = asyncio.get_running_loop().time
        if (left_s := self.left_s(clock())) > 0:
            await asyncio.sleep(left_s)
        self.note_sent(clock())

    def left_s(self, now_s: float) -> float:
        """The seconds until the next message may be sent; not above 0 if it may be sent at once."""
        return self._next_at - self._ahead_s - now_s

    def note_sent(self, now_s: float) -> None:
        """Counts a message."""
        self._next_at = max(self._next_at, now_s) + self._every_s
