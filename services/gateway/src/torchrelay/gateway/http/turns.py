"""Turns at the event loop for what may come in crowds, so that the requests of others go on meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

ROUND_S = 0.001
MAX_AT_ONCE = 16
MAX_PAUSE_S = 0.05
_WEIGHT = 0.25  # of the newest measurement


class Lane(NamedTuple):
    """Who takes turns: a tenant, or the strangers of one address, of whom the last one to come goes first: whoever has
    waited longest is the likeliest to have given up. From however many addresses strangers come, every second turn is
    a tenant's.
    """

    name: str
    is_of_strangers: bool


class Turns:
    """Calls of one kind that take a third of the loop's time at most: some at once, for about ``ROUND_S``, then a pause
    twice as long as they took, and again.

    What they took is their own time and that of the first steps of the tasks that they begin, whatever else the loop
    does meanwhile.
    """

    def __init__(self, max_at_once: int = MAX_AT_ONCE, clock: Callable[[], float] = time.thread_time) -> None:
        """``clock``: in seconds; of CPU, since a wait for a processor that others have is no work of the calls."""
        self._max_at_once, self._clock = max_at_once, clock
        self._call_s = ROUND_S  # what a call took of late
        # The next lane first; none is empty.
        self._tenants: dict[Lane, OrderedDict[Callable[[], None], None]] = {}
        self._strangers: dict[Lane, OrderedDict[Callable[[], None], None]] = {}
        self._is_turn_of_tenants = True
        self._is_paused = False  # or at work
        self._steps_begin_at = 0.0

    def take(self, lane: Lane, call: Callable[[], None]) -> None:
        """Calls at once if nobody waits, and later otherwise."""
        self._lanes_like(lane).setdefault(lane, OrderedDict())[call] = None
        if not self._is_paused:
            self._begin()

    def give_up(self, lane: Lane, call: Callable[[], None]) -> None:
        """Ends the wait of ``call``, if it waits."""
        lanes = self._lanes_like(lane)
        waiting = lanes.get(lane)
        if waiting is not None and call in waiting:
            del waiting[call]
            if not waiting:
                del lanes[lane]

    @property
    def is_free(self) -> bool:
        """Whether a call would be made at once."""
        return not self._is_paused

    def _lanes_like(self, lane: Lane) -> dict[Lane, OrderedDict[Callable[[], None], None]]:
        return self._strangers if lane.is_of_strangers else self._tenants

    @property
    def _has_calls(self) -> bool:
        return bool(self._tenants or self._strangers)

    def _begin(self) -> None:
        self._is_paused = self._has_calls
        if not self._is_paused:
            return
        loop, begin_at, num_calls = asyncio.get_running_loop(), self._clock(), 0
        loop.call_soon(
            self._begin_steps
        )  # called just before the tasks that the calls begin, and ``_pause`` after them
        try:
            while self._has_calls and num_calls < max(1, min(self._max_at_once, int(ROUND_S / self._call_s))):
                num_calls += 1
                self._next()()
        finally:
            loop.call_soon(self._pause, num_calls, self._clock() - begin_at)

    def _begin_steps(self) -> None:
        self._steps_begin_at = self._clock()

    def _pause(self, num_calls: int, calls_s: float) -> None:
        took_s = calls_s + self._clock() - self._steps_begin_at
        self._call_s += _WEIGHT * (took_s / num_calls - self._call_s)
        asyncio.get_running_loop().call_later(min(MAX_PAUSE_S, 2 * took_s), self._begin)

    def _next(self) -> Callable[[], None]:
        lanes = (
            self._tenants if self._tenants and (self._is_turn_of_tenants or not self._strangers) else self._strangers
        )
        self._is_turn_of_tenants = lanes is self._strangers
        lane = next(iter(lanes))
        waiting = lanes.pop(lane)
        call, _ = waiting.popitem(last=lane.is_of_strangers)
        if waiting:
            lanes[lane] = waiting  # behind the others
        return call
