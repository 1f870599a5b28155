"""Requests that wait for a placement, by model version: who is next, and who must leave when a queue is full.

Who is next: first those whose deadline counts, and batch work only where none of these waits or its own deadline is
near. Among these the tenant that got the least, by its weight; of its requests the one with the earliest deadline. A
full queue refuses the tenant that has most of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from torchrelay.scheduler.policy.admission.fair_queue import FairQueue
from torchrelay.scheduler.policy.core import Admission, AttemptKey, ServiceClass


@dataclass(slots=True)
class _VersionQueue:
    """``keys``: in order of arrival."""

    keys: dict[AttemptKey, Admission] = field(default_factory=dict)
    timely: FairQueue = field(default_factory=FairQueue)
    batch: FairQueue = field(default_factory=FairQueue)
    num_of: dict[str, int] = field(default_factory=dict)  # waiting requests, by tenant
    num_prefill_tokens: int = 0

    def fair_queue_of(self, admission: Admission) -> FairQueue:
        return self.batch if admission.service_class is ServiceClass.BATCH else self.timely


class AdmissionQueues:
    """``limit``: per version; ``limit_total``: of all; ``batch_lead_s``: so long before its deadline, batch work is no
    longer batch work; ``debt_s``: for so long a version's empty queue remembers which tenants got more than others.
    """

    def __init__(self, limit: int, limit_total: int, batch_lead_s: float = 30.0, debt_s: float = 30.0) -> None:
        self._limit, self._limit_total = limit, limit_total
        self._batch_lead_s, self._debt_s = batch_lead_s, debt_s
        self._queues: dict[str, _VersionQueue] = {}  # those that are not empty
        self._emptied: dict[str, tuple[float, _VersionQueue]] = {}  # those with debts, in the order of these times
        self._version_of: dict[AttemptKey, str] = {}
        self._sequence = count()

    def __len__(self) -> int:
        return len(self._version_of)

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._version_of

    def __iter__(self) -> Iterator[Admission]:
        for queue in self._queues.values():
            yield from queue.keys.values()

    def displaced_by(self, admission: Admission) -> Admission | None:
        """Who must leave so that this one can wait: nobody, a request of the tenant with most, or the newcomer."""
        if len(self._version_of) < self._limit_total and self.num_waiting(admission.version_id) < self._limit:
            return None
        queue = self._queues.get(admission.version_id)
        if queue is None:
            return admission  # other models fill all queues: theirs is not ours to give
        own = queue.num_of.get(admission.tenant, 0)
        tenant, most = max(queue.num_of.items(), key=lambda one: (one[1], one[0]))
        if tenant == admission.tenant or most <= own + 1:
            return admission
        # One that has given tokens is a stream that somebody reads: it is not cut off for a newcomer.
        fresh = (one for one in reversed(queue.keys.values()) if one.tenant == tenant and not one.num_forced_tokens)
        return next(fresh, admission)

    def push(self, admission: Admission) -> None:
        """Adds a request. The caller has made room as ``displaced_by`` says."""
        assert admission.key not in self._version_of
        queue = self._queues.get(admission.version_id)
        if queue is None:
            _, queue = self._emptied.pop(admission.version_id, (0.0, _VersionQueue()))
            self._queues[admission.version_id] = queue
        queue.fair_queue_of(admission).push(admission, next(self._sequence))
        queue.keys[admission.key] = admission
        queue.num_of[admission.tenant] = queue.num_of.get(admission.tenant, 0) + 1
        queue.num_prefill_tokens += admission.num_prefill_tokens
        self._version_of[admission.key] = admission.version_id

    def remove(self, key: AttemptKey, now: float) -> Admission | None:
        version_id = self._version_of.get(key)
        if version_id is None:
            return None
        queue = self._queues[version_id]
        admission = queue.keys[key]
        queue.fair_queue_of(admission).remove(admission)
        self._forget(admission, queue, now)
        return admission

    def take(self, admission: Admission, now: float) -> None:
        """The request is placed: its tenant has been served."""
        queue = self._queues[admission.version_id]
        queue.fair_queue_of(admission).take(admission)
        self._forget(admission, queue, now)

    def _forget(self, admission: Admission, queue: _VersionQueue, now: float) -> None:
        version_id = self._version_of.pop(admission.key)
        del queue.keys[admission.key]
        queue.num_of[admission.tenant] -= 1
        queue.num_prefill_tokens -= admission.num_prefill_tokens
        if not queue.num_of[admission.tenant]:
            del queue.num_of[admission.tenant]
        if not queue.keys:
            del self._queues[version_id]
            if queue.timely.has_debts or queue.batch.has_debts:
                self._emptied[version_id] = (now, queue)

    def forget_debts(self, now: float) -> None:
        """Those of versions that nobody has waited for in a while."""
        for version_id, (emptied_at, _) in list(self._emptied.items()):
            if now - emptied_at < self._debt_s:
                break
            del self._emptied[version_id]

    @property
    def num_remembered(self) -> int:
        """Empty queues with debts."""
        return len(self._emptied)

    def next(self, version_id: str, now: float, skipped: frozenset[AttemptKey] = frozenset()) -> Admission | None:
        """Who is to be placed next, but for those skipped."""
        queue = self._queues.get(version_id)
        if queue is None:
            return None
        batch = queue.batch.first(skipped)
        if batch is not None and queue.keys[batch].deadline - now <= self._batch_lead_s:
            return queue.keys[batch]
        first = queue.timely.first(skipped) or batch
        return queue.keys[first] if first is not None else None

    def waiting(self, version_id: str) -> tuple[Admission, ...]:
        """The version's queue, in order of arrival."""
        queue = self._queues.get(version_id)
        return tuple(queue.keys.values()) if queue is not None else ()

    def num_waiting(self, version_id: str) -> int:
        queue = self._queues.get(version_id)
        return len(queue.keys) if queue is not None else 0

    def num_of_tenant(self, version_id: str, tenant: str) -> int:
        queue = self._queues.get(version_id)
        return queue.num_of.get(tenant, 0) if queue is not None else 0

    def num_prefill_tokens(self, version_id: str) -> int:
        """Of all that wait for the version."""
        queue = self._queues.get(version_id)
        return queue.num_prefill_tokens if queue is not None else 0

    def oldest_wait_s(self, version_id: str, now: float) -> float:
        queue = self._queues.get(version_id)
        return now - next(iter(queue.keys.values())).admitted_at if queue is not None else 0.0

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions with waiting admissions."""
        return tuple(self._queues)
