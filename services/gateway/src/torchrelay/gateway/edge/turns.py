"""Turns at the event loop for calls that may come in crowds, so that other clients' requests go on meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

ROUND_S = 0.001
MAX_AT_ONCE = 16
MAX_PAUSE_S = 0.05
_WEIGHT = 0.25  # of the newest measurement

_Calls = dict[Callable[[], None], None]  # in order


class ClientGroup(NamedTuple):
    """Clients that take turns together: a tenant, or all unauthenticated clients of one address."""

    name: str
    is_authenticated: bool


class Turns:
    """Limits calls of one kind to a third of the loop's time: some calls for about ``ROUND_S``, then a pause twice as
    long as they took, and again.

    Groups take turns. Every second turn is a tenant's, however many addresses unauthenticated clients come from. The
    measured time is that of the calls and of the first steps of the tasks that they begin.
    """

    def __init__(self, max_at_once: int = MAX_AT_ONCE, clock: Callable[[], float] = time.thread_time) -> None:
        """``clock``: CPU time in seconds, since a wait for a busy processor is no work of the calls."""
        self._max_at_once, self._clock = max_at_once, clock
        self._call_s = ROUND_S  # moving average of a call's time
        # Waiting calls; the group with the next turn is first, and no group is empty.
        self._tenants: dict[ClientGroup, _Calls] = {}
        self._unauthenticated: dict[ClientGroup, _Calls] = {}
        self._is_turn_of_tenants = True
        self._is_paused = False  # or in the middle of a round
        self._steps_begin_at = 0.0

    def take(self, group: ClientGroup, call: Callable[[], None]) -> None:
        """Calls ``call`` at once if no call waits, and later otherwise."""
        self._groups_like(group).setdefault(group, {})[call] = None
        if not self._is_paused:
            self._begin()

    def withdraw(self, group: ClientGroup, call: Callable[[], None]) -> None:
        """Removes ``call`` if it still waits."""
        groups = self._groups_like(group)
        if (waiting := groups.get(group)) is not None:
            waiting.pop(call, None)
            if not waiting:
                del groups[group]

    @property
    def is_free(self) -> bool:
        """Whether ``take`` would call at once."""
        return not self._is_paused

    def _groups_like(self, group: ClientGroup) -> dict[ClientGroup, _Calls]:
        return self._tenants if group.is_authenticated else self._unauthenticated

    @property
    def _has_calls(self) -> bool:
        return bool(self._tenants or self._unauthenticated)

    def _begin(self) -> None:
        self._is_paused = self._has_calls
        if not self._is_paused:
            return
        loop, begin_at, num_calls = asyncio.get_running_loop(), self._clock(), 0
        loop.call_soon(self._begin_steps)  # runs before the tasks that the calls begin; ``_pause`` runs after them
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
        is_tenants = bool(self._tenants) and (self._is_turn_of_tenants or not self._unauthenticated)
        groups = self._tenants if is_tenants else self._unauthenticated
        self._is_turn_of_tenants = not is_tenants
        group = next(iter(groups))
        waiting = groups.pop(group)
        call = next(iter(waiting))
        del waiting[call]
        if waiting:
            groups[group] = waiting  # behind the others
        return call
