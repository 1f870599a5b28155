"""Work of many tenants on few servers, in shares of measured time. Pure: the seconds are arguments.

Start-time fair queueing (Goyal, Vin, Cheng 1996) with costs that are known only afterwards: each tenant's *start* is
the time it has used, and the tenant with the earliest start is served next. A tenant that comes back after a pause
starts at the queue's own time, which follows the starts that are served: idle time is not saved up, and what was used
is not forgotten by leaving.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
P = TypeVar("P")


@dataclass(slots=True)
class _Share(Generic[T]):
    """A tenant's work."""

    start_s: float
    waiting: deque[tuple[T, int]] = field(default_factory=deque)  # with its bytes
    num_waiting_bytes: int = 0
    num_running: int = 0


class FairQueue(Generic[T]):
    """Items by tenant, each tenant's in the order of arrival.

    A tenant runs at most ``max_running`` of them at once, and at most ``max_waiting`` of ``max_waiting_bytes`` wait.
    """

    def __init__(self, max_running: int, max_waiting: int, max_waiting_bytes: int) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._shares: dict[str, _Share[T]] = {}
        self._now_s = 0.0

    @property
    def num_waiting(self) -> int:
        return sum(len(share.waiting) for share in self._shares.values())

    def num_running(self, tenant: str) -> int:
        share = self._shares.get(tenant)
        return 0 if share is None else share.num_running

    def add(self, tenant: str, item: T, num_bytes: int) -> bool:
        """False if the tenant's places or bytes are used up; a first item of any size always fits."""
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = _Share(self._now_s)
        share.start_s = max(share.start_s, self._now_s)
        is_full = len(share.waiting) >= self._max_waiting
        if is_full or (share.waiting and share.num_waiting_bytes + num_bytes > self._max_waiting_bytes):
            return False
        share.waiting.append((item, num_bytes))
        share.num_waiting_bytes += num_bytes
        return True

    def remove(self, tenant: str, item: T) -> bool:
        """Takes a waiting item back; False if it does not wait."""
        share = self._shares.get(tenant)
        for entry in share.waiting if share is not None else ():
            if entry[0] is item:
                assert share is not None
                share.waiting.remove(entry)
                share.num_waiting_bytes -= entry[1]
                self._forget_if_idle(tenant, share)
                return True
        return False

    def next(self, place_of: Callable[[T], P | None]) -> tuple[T, P] | None:
        """The next item that has a place now, which then runs. ``place_of`` is asked about the first of each tenant."""
        ready = [share for share in self._shares.values() if share.waiting and share.num_running < self._max_running]
        for share in sorted(ready, key=lambda share: (share.start_s, share.num_running)):
            item, num_bytes = share.waiting[0]
            place = place_of(item)
            if place is not None:
                share.waiting.popleft()
                share.num_waiting_bytes -= num_bytes
                share.num_running += 1
                self._now_s = max(self._now_s, share.start_s)
                return item, place
        return None

    def ended(self, tenant: str, used_s: float) -> None:
        """One of the tenant's running items has ended, after ``used_s`` seconds."""
        share = self._shares[tenant]
        share.num_running -= 1
        share.start_s += used_s
        if not any(other.waiting or other.num_running for other in self._shares.values()):
            self._now_s = max(other.start_s for other in self._shares.values())
        for name, other in list(self._shares.items()):
            self._forget_if_idle(name, other)

    def _forget_if_idle(self, tenant: str, share: _Share[T]) -> None:
        if not share.waiting and not share.num_running and share.start_s <= self._now_s:
            del self._shares[tenant]
