"""How many bytes of KV may wait for decode workers at once."""

from __future__ import annotations

import asyncio
from collections import deque


class ByteBudget:
    """Bytes handed out in the order asked for; a demand over the whole budget is met when nothing else is out."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num_out = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, num_bytes: int) -> None:
        """Waits for its turn and for room. A cancelled wait takes nothing."""
        if not self._waiting and self._fits(num_bytes):
            self.num_out += num_bytes
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(num_bytes)  # it was granted in the same moment
            raise

    def release(self, num_bytes: int) -> None:
        """Gives bytes back and lets the next ones in."""
        self.num_out -= num_bytes
        while self._waiting:
            wanted, turn = self._waiting[0]
            if not turn.cancelled():
                if not self._fits(wanted):
                    return
                self.num_out += wanted
                turn.set_result(None)
            self._waiting.popleft()

    def _fits(self, num_bytes: int) -> bool:
        return self.num_out == 0 or self.num_out + num_bytes <= self.num_bytes
