"""A budget for the bytes of KV that wait for decode workers."""

from __future__ import annotations

import asyncio
from collections import deque


class ByteBudget:
    """Grants bytes in the order of requests; one larger than the whole budget is granted when nothing else is."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num_granted = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, num_bytes: int) -> None:
        """Waits for its turn and for room. A cancelled wait takes nothing."""
        if not self._waiting and self._fits(num_bytes):
            self.num_granted += num_bytes
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(num_bytes)  # granted at the same moment
            raise

    def release(self, num_bytes: int) -> None:
        """Returns bytes and grants the next requests."""
        self.num_granted -= num_bytes
        while self._waiting:
            wanted, turn = self._waiting[0]
            if not turn.cancelled():
                if not self._fits(wanted):
                    return
                self.num_granted += wanted
                turn.set_result(None)
            self._waiting.popleft()

    def _fits(self, num_bytes: int) -> bool:
        return self.num_granted == 0 or self.num_granted + num_bytes <= self.num_bytes
