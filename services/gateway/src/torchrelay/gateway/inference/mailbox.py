"""What happens to one request, gathered until the request's own task looks at it."""

from __future__ import annotations

import asyncio

from torchrelay.gateway.inference.core import Happening


class Mailbox:
    """Takes from many streams, gives to one task; ``put`` never blocks a stream.

    It holds at most the tokens of one request, which its ``max_tokens`` bounds: a slow reader slows only itself.
    While nothing comes, ``take`` returns empty-handed at every tick. Ticks cost one timer per request, none per token.
    """

    def __init__(self, first_tick_s: float, tick_s: float) -> None:
        self._items: list[Happening] = []
        self._tick_s = tick_s
        self._has_ticked = False
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._timer = self._loop.call_later(first_tick_s, self._tick)

    def put(self, item: Happening) -> None:
        self._items.append(item)
        self._wake()

    async def take(self) -> list[Happening]:
        """All that happened since the last call; waits for something, or for a tick (then the list is empty)."""
        if not self._items and not self._has_ticked:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._has_ticked = False
        items, self._items = self._items, []
        return items

    def close(self) -> None:
        """Ends the ticks."""
        self._timer.cancel()

    def _tick(self) -> None:
        self._has_ticked = True
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
