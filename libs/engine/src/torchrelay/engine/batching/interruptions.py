"""Cancels from other threads, and deadlines. Both take effect between two layers, or between two steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count

from torchrelay.engine.batching.batch_scheduler import BatchScheduler
from torchrelay.engine.batching.sequences import GroupState, SequenceGroup

_MIN_PRUNE_SIZE = 64


class PendingCancels:
    """Cancels to apply at the next layer boundary."""

    def __init__(self) -> None:
        self._wanted: dict[tuple[str, int | None], None] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._wanted)

    def put(self, group_id: str, choice: int | None) -> None:
        """(any thread) Adds a cancel."""
        with self._lock:
            self._wanted[group_id, choice] = None

    def discard(self, group_id: str, choice: int | None) -> None:
        """Removes a cancel that was applied, so that it does not hit a later group of the same name."""
        if self._wanted:
            with self._lock:
                self._wanted.pop((group_id, choice), None)

    def drain(self) -> list[tuple[str, int | None]]:
        """Takes all, in order."""
        if not self._wanted:  # called at every layer: no lock in the common case
            return []
        with self._lock:
            taken, self._wanted = list(self._wanted), {}
        return taken


class DeadlineQueue:
    """Deadlines of groups. Deadlines of ended groups are dropped when they come up, or when there are many."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, SequenceGroup]] = []
        self._limit = _MIN_PRUNE_SIZE
        self._order = count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, group: SequenceGroup) -> None:
        if group.spec.deadline_s is None:
            return
        heappush(self._heap, (group.spec.deadline_s, next(self._order), group))
        if len(self._heap) > self._limit:
            self._heap = [each for each in self._heap if each[2].state is not GroupState.GONE]
            heapify(self._heap)
            self._limit = max(_MIN_PRUNE_SIZE, 2 * len(self._heap))

    def earliest_s(self) -> float | None:
        """The next deadline of a live group."""
        while self._heap and self._heap[0][2].state is GroupState.GONE:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now_s: float) -> list[SequenceGroup]:
        """Takes the groups whose deadline has passed, the earliest first."""
        late = []
        while (earliest_s := self.earliest_s()) is not None and earliest_s <= now_s:
            late.append(heappop(self._heap)[2])
        return late


@dataclass(eq=False)
class Interruptions:
    """Ends groups of one scheduler at layer boundaries. Deadlines are by ``clock``."""

    _scheduler: BatchScheduler
    _clock: Callable[[], float]
    cancels: PendingCancels = field(default_factory=PendingCancels)
    deadlines: DeadlineQueue = field(default_factory=DeadlineQueue)
    _expired: list[str] = field(default_factory=list)

    def apply(self) -> bool:
        """Applies cancels and deadlines before each layer of a step, or each call of several layers.

        Returns whether any group or choice ended.
        """
        ended = False
        for group_id, choice in self.cancels.drain():
            ended |= self._scheduler.cancel(group_id, choice)
        if self.deadlines:
            for group in self.deadlines.due(self._clock()):
                self._scheduler.cancel(group.spec.group_id)
                self._expired.append(group.spec.group_id)
                ended = True
        return ended

    def next_deadline_in_s(self) -> float | None:
        """Seconds to the next deadline, at least 0; None without one."""
        earliest_s = self.deadlines.earliest_s()
        return None if earliest_s is None else max(0.0, earliest_s - self._clock())

    def take_expired(self) -> tuple[str, ...]:
        """The groups that expired since the last call."""
        expired, self._expired = tuple(self._expired), []
        return expired
