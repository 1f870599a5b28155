"""Work of many tenants on few servers, in shares of the time that it takes. Pure: the seconds are arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from torchrelay.common.fair_queue import FairQueue

T = TypeVar("T")
P = TypeVar("P")


class BoundedQueue(Generic[T]):
    """A fair queue with limits for each tenant, whose costs are known only when an item ends.

    At most ``max_running`` items of a tenant run at once, and at most ``max_waiting`` of ``max_waiting_bytes`` wait.
    """

    def __init__(self, max_running: int, max_waiting: int, max_waiting_bytes: int) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._queue: FairQueue[T] = FairQueue()
        self._num_bytes: dict[T, int] = {}  # of waiting items
        self._num_waiting_bytes: Counter[str] = Counter()  # by tenant
        self._num_running: Counter[str] = Counter()  # by tenant

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def num_running(self, tenant: str) -> int:
        return self._num_running[tenant]

    def add(self, tenant: str, item: T, num_bytes: int) -> bool:
        """Queues an item; returns False if that exceeded a limit. A first item of any size is within the limits."""
        num_waiting = self._queue.num_of(tenant)
        num_bytes_after = self._num_waiting_bytes[tenant] + num_bytes
        if num_waiting >= self._max_waiting or (num_waiting and num_bytes_after > self._max_waiting_bytes):
            return False
        self._queue.push(tenant, item)
        self._num_bytes[item] = num_bytes
        self._num_waiting_bytes[tenant] = num_bytes_after
        return True

    def remove(self, tenant: str, item: T) -> bool:
        """Removes a waiting item; returns False if it does not wait."""
        if not self._queue.remove(tenant, item):
            return False
        self._num_waiting_bytes[tenant] -= self._num_bytes.pop(item)
        if not self._num_waiting_bytes[tenant]:
            del self._num_waiting_bytes[tenant]
        return True

    def next(self, place_of: Callable[[T], P | None]) -> tuple[T, P] | None:
        """Takes the next item that has a place, which then runs. ``place_of`` is asked about each tenant's first."""
        tags, running = self._queue.tags, self._num_running
        ready = [head for head in self._queue.heads() if running[head[0]] < self._max_running]
        for tenant, item in sorted(ready, key=lambda head: (tags[head[0]], running[head[0]])):
            if (place := place_of(item)) is not None:
                self.remove(tenant, item)
                running[tenant] += 1
                tags.serve(tenant)
                return item, place
        return None

    def ended(self, tenant: str, used_s: float) -> None:
        """Charges the tenant for an item that has run for ``used_s`` seconds."""
        self._num_running[tenant] -= 1
        self._queue.tags.charge(tenant, used_s)
        if not self._num_running[tenant]:
            del self._num_running[tenant]
        if not self._queue and not self._num_running:
            self._queue.tags.end_busy_period()
