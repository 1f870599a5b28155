"""Requests that wait for a placement: one bounded FIFO per model version, and a bound on the total."""

from __future__ import annotations

from collections.abc import Iterator

from torchrelay.scheduler.policy.core import Admission, AttemptKey


class AdmissionQueues:
    """Waiting admissions in order of arrival."""

    def __init__(self, limit: int, limit_total: int) -> None:
        self._limit = limit
        self._limit_total = limit_total
        self._queues: dict[str, dict[AttemptKey, Admission]] = {}
        self._version_of: dict[AttemptKey, str] = {}

    def __len__(self) -> int:
        return len(self._version_of)

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._version_of

    def __iter__(self) -> Iterator[Admission]:
        for queue in self._queues.values():
            yield from queue.values()

    def is_full(self, version_id: str) -> bool:
        return self.num_waiting(version_id) >= self._limit or len(self) >= self._limit_total

    def push(self, admission: Admission) -> None:
        """Adds at the end. The caller has checked ``is_full``."""
        assert admission.key not in self._version_of
        self._queues.setdefault(admission.version_id, {})[admission.key] = admission
        self._version_of[admission.key] = admission.version_id

    def remove(self, key: AttemptKey) -> Admission | None:
        version_id = self._version_of.pop(key, None)
        if version_id is None:
            return None
        queue = self._queues[version_id]
        admission = queue.pop(key)
        if not queue:
            del self._queues[version_id]
        return admission

    def waiting(self, version_id: str) -> tuple[Admission, ...]:
        """The version's queue, in order of arrival."""
        return tuple(self._queues.get(version_id, {}).values())

    def position(self, key: AttemptKey) -> int:
        """Position in its queue, from 0."""
        return list(self._queues[self._version_of[key]]).index(key)

    def num_waiting(self, version_id: str) -> int:
        return len(self._queues.get(version_id, {}))

    def oldest_wait_s(self, version_id: str, now: float) -> float:
        queue = self._queues.get(version_id)
        return now - next(iter(queue.values())).admitted_at if queue else 0.0

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions with waiting admissions."""
        return tuple(self._queues)
