"""Requests that wait for a placement: one bounded FIFO per model version, and a bound over all."""

from __future__ import annotations

from collections.abc import Iterator

from torchrelay.scheduler.core import Admission, AttemptKey


class Queues:
    """Waiting admissions in order of arrival. A withdrawn one leaves its place at once."""

    def __init__(self, limit: int, limit_total: int) -> None:
        self._limit = limit
        self._limit_total = limit_total
        self._lines: dict[str, dict[AttemptKey, Admission]] = {}
        self._version_of: dict[AttemptKey, str] = {}

    def __len__(self) -> int:
        return len(self._version_of)

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._version_of

    def __iter__(self) -> Iterator[Admission]:
        for line in self._lines.values():
            yield from line.values()

    def is_full(self, version_id: str) -> bool:
        return self.num_waiting(version_id) >= self._limit or len(self) >= self._limit_total

    def push(self, admission: Admission) -> int:
        """Adds at the end; returns the place in the queue, from 0. The caller has asked ``is_full``."""
        assert admission.key not in self._version_of
        line = self._lines.setdefault(admission.version_id, {})
        line[admission.key] = admission
        self._version_of[admission.key] = admission.version_id
        return len(line) - 1

    def remove(self, key: AttemptKey) -> Admission | None:
        version_id = self._version_of.pop(key, None)
        if version_id is None:
            return None
        line = self._lines[version_id]
        admission = line.pop(key)
        if not line:
            del self._lines[version_id]
        return admission

    def waiting(self, version_id: str) -> tuple[Admission, ...]:
        """The version's line, first come first."""
        return tuple(self._lines.get(version_id, {}).values())

    def position(self, key: AttemptKey) -> int:
        """Place in its line, from 0."""
        return list(self._lines[self._version_of[key]]).index(key)

    def num_waiting(self, version_id: str) -> int:
        return len(self._lines.get(version_id, {}))

    def oldest_wait_s(self, version_id: str, now: float) -> float:
        line = self._lines.get(version_id)
        return now - next(iter(line.values())).admitted_at if line else 0.0

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions somebody waits for."""
        return tuple(self._lines)
