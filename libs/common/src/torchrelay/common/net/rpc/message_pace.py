"""How soon the messages of a stream follow each other, where each may carry many entries."""

from __future__ import annotations

import asyncio
from typing import Final

EVERY_S: Final = 0.002


class MessagePace:
    """At most one message in ``every_s``: one costs as much as dozens of entries. After a silence the first entry goes
    at once; those that follow it closely go together.
    """

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._next_at = 0.0

    async def wait(self) -> None:
        """Until the next message may be sent, which the caller then does."""
        clock = asyncio.get_running_loop().time
        if (left_s := self._next_at - clock()) > 0:
            await asyncio.sleep(left_s)
        self._next_at = clock() + self._every_s
