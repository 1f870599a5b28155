"""Turns at the event loop for what may come in crowds, so that the requests of others go on meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

MAX_PAUSE_S = 0.05


class Lane(NamedTuple):
    """Who takes turns: a tenant, or the strangers of one address, of whom the last one to come goes first.

    So a client who comes in the midst of a crowd, and is about to show a key, waits for none of it; and whoever has
    waited longest is the likeliest to have given up.
    """

    name: str
    is_of_strangers: bool


class Turns:
    """Calls that take half of the loop's time at most: a few at once, then a pause as long as they took, and again."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._lanes: dict[Lane, OrderedDict[Callable[[], None], None]] = {}  # the next one first; none is empty
        self._is_paused = False  # or at work

    def take(self, lane: Lane, call: Callable[[], None]) -> None:
        """Calls at once if nobody waits, and later otherwise. ``call`` must raise nothing; it may begin a task."""
        self._lanes.setdefault(lane, OrderedDict())[call] = None
        if not self._is_paused:
            self._begin()

    def give_up(self, lane: Lane, call: Callable[[], None]) -> None:
        """Ends the wait of ``call``, if it waits."""
        waiting = self._lanes.get(lane)
        if waiting is not None and call in waiting:
            del waiting[call]
            if not waiting:
                del self._lanes[lane]

    def _begin(self) -> None:
        self._is_paused = bool(self._lanes)
        if not self._is_paused:
            return
        began_at = time.perf_counter()
        for _ in range(self._at_once):
            if self._lanes:
                self._next()()
        # After the first steps of the tasks that were begun, and after the read events of resumed connections.
        asyncio.get_running_loop().call_soon(self._pause, began_at)

    def _pause(self, began_at: float) -> None:
        pause_s = min(MAX_PAUSE_S, time.perf_counter() - began_at)
        asyncio.get_running_loop().call_later(pause_s, self._begin)

    def _next(self) -> Callable[[], None]:
        lane = next(iter(self._lanes))
        waiting = self._lanes.pop(lane)
        call, _ = waiting.popitem(last=lane.is_of_strangers)
        if waiting:
            self._lanes[lane] = waiting  # behind the others
        return call
