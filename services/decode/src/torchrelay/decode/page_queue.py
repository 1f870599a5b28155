"""KV offers that wait for pages, in order of arrival.

Small offers cannot overtake a large offer forever, and freed pages are tried by one offer, not by all.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from torchrelay.engine.core import KvPoolFull

T = TypeVar("T")


class PageQueue:
    """A queue of offers, used on the event loop only."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Event] = deque()

    async def reserve(self, reserve: Callable[[], Awaitable[T]], is_wanted: Callable[[], bool]) -> T | None:
        """Calls ``reserve`` in turn, and again while it raises ``KvPoolFull``; returns its result.

        Returns None once ``is_wanted`` is false.
        """
        turn = asyncio.Event()
        self._waiting.append(turn)
        try:
            while is_wanted():
                turn.clear()
                if self._waiting[0] is turn:
                    try:
                        return await reserve()
                    except KvPoolFull:
                        pass
                await turn.wait()
            return None
        finally:
            self._waiting.remove(turn)
            self.pages_freed()

    def pages_freed(self) -> None:
        """Makes the first offer try again."""
        if self._waiting:
            self._waiting[0].set()

    def attempt_ended(self) -> None:
        """Makes each offer check whether it is still wanted."""
        for turn in self._waiting:
            turn.set()
