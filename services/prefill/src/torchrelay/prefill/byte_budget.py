"""A budget for the bytes of KV that wait for other workers."""

from __future__ import annotations

import asyncio
from collections import deque


class ByteBudget:
    """Grants bytes in the order of requests; a request above the whole budget is granted when nothing else is."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num_granted = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, num_bytes: int) -> None:
        """Waits for its turn and for free bytes. A cancelled wait takes nothing."""
        if not self._waiting and self._fits(num_bytes):
            self.num_granted += num_bytes
            return
        grant = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, grant))
        try:
            await grant
        except asyncio.CancelledError:
            if grant.done() and not grant.cancelled():
                self.release(num_bytes)  # granted at the same moment
            raise

    def release(self, num_bytes: int) -> None:
        """Returns bytes and grants the next requests."""
        self.num_granted -= num_bytes
        while self._waiting:
            wanted, grant = self._waiting[0]
            if not grant.cancelled():
                if not self._fits(wanted):
                    return
                self.num_granted += wanted
                grant.set_result(None)
            self._waiting.popleft()

    def _fits(self, num_bytes: int) -> bool:
        return self.num_granted == 0 or self.num_granted + num_bytes <= self.num_bytes
