"""Wakes a request's consumer: on events, or after a keep-alive interval without any."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Notifier:
    """Coalesces notifications, and ticks while there are none. One timer per tick, none per token.

    ``tick_s``: at each tick, the time until the next.
    """

    def __init__(self, first_tick_s: float, tick_s: Callable[[], float]) -> None:
        self._tick_s = tick_s
        self._is_notified = False
        self._has_ticked = False
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._pausing: asyncio.Future[None] | None = None
        self._timer = self._loop.call_later(first_tick_s, self._tick)

    def notify(self) -> None:
        if not self._is_notified:
            self._is_notified = True
            self._wake()

    async def wait(self) -> bool:
        """Waits for a notification since the last call (True) or a tick (False)."""
        if not self._is_notified and not self._has_ticked:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        is_notified, self._is_notified, self._has_ticked = self._is_notified, False, False
        return is_notified

    async def pause(self, pause_s: float) -> None:
        """Sleeps, regardless of notifications, until ``end_pause``."""
        self._pausing = self._loop.create_future()
        timer = self._loop.call_later(pause_s, self.end_pause)
        try:
            await self._pausing
        finally:
            timer.cancel()
            self._pausing = None

    def end_pause(self) -> None:
        if self._pausing is not None and not self._pausing.done():
            self._pausing.set_result(None)

    def close(self) -> None:
        """Stops ticking."""
        self._timer.cancel()

    def _tick(self) -> None:
        self._has_ticked = True
        self._timer = self._loop.call_later(self._tick_s(), self._tick)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
