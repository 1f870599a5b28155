"""What a request's door waits for: something happened, or enough time passed to say that nothing did."""

from __future__ import annotations

import asyncio


class Bell:
    """Rung by whoever has news; ticks while there are none. A tick costs one timer per request, none per token."""

    def __init__(self, first_tick_s: float, tick_s: float) -> None:
        self._tick_s = tick_s
        self._is_rung = False
        self._has_ticked = False
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._resting: asyncio.Future[None] | None = None
        self._timer = self._loop.call_later(first_tick_s, self._tick)

    def ring(self) -> None:
        if not self._is_rung:
            self._is_rung = True
            self._wake()

    async def wait(self) -> bool:
        """Waits for a ring since the last call (True) or a tick (False)."""
        if not self._is_rung and not self._has_ticked:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        is_rung, self._is_rung, self._has_ticked = self._is_rung, False, False
        return is_rung

    async def rest(self, rest_s: float) -> None:
        """Waits so long, whatever rings, or until ``end_rest``."""
        self._resting = self._loop.create_future()
        timer = self._loop.call_later(rest_s, self.end_rest)
        try:
            await self._resting
        finally:
            timer.cancel()
            self._resting = None

    def end_rest(self) -> None:
        if self._resting is not None and not self._resting.done():
            self._resting.set_result(None)

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
