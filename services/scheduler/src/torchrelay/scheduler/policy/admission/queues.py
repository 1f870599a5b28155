"""Requests that wait for a placement, by model version: who is next, and who must leave when a queue is full.

Who is next: first those whose deadline counts, and batch work only where none of these waits or its own deadline is
near. Among these the tenant that got the least, by its weight (start-time fair queueing: Goyal, Vin and Cheng, 1996);
of its requests the one with the earliest deadline. A full queue refuses the tenant that has most of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from torchrelay.scheduler.policy.core import Admission, AttemptKey, ServiceClass

_Entry = tuple[float, int, Admission]  # by deadline, then by arrival


@dataclass(slots=True)
class _TenantQueue:
    """``served``: what the tenant got so far, in weighted prompt tokens."""

    served: float = 0.0
    waiting: list[_Entry] = field(default_factory=list)


@dataclass(slots=True)
class _VersionQueue:
    """``keys``: in order of arrival. A heap may still hold what has left the queue."""

    keys: dict[AttemptKey, Admission] = field(default_factory=dict)
    timely: dict[str, _TenantQueue] = field(default_factory=dict)  # by tenant
    batch: dict[str, _TenantQueue] = field(default_factory=dict)
    num_of: dict[str, int] = field(default_factory=dict)  # waiting requests, by tenant
    num_prefill_tokens: int = 0
    served: float = 0.0  # of the tenant that was served last: a newcomer begins there


class AdmissionQueues:
    """``limit``: per version; ``limit_total``: of all; ``batch_lead_s``: so long before its deadline, batch work is no
    longer batch work.
    """

    def __init__(self, limit: int, limit_total: int, batch_lead_s: float = 30.0) -> None:
        self._limit, self._limit_total, self._batch_lead_s = limit, limit_total, batch_lead_s
        self._queues: dict[str, _VersionQueue] = {}
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
        queue = self._queues.setdefault(admission.version_id, _VersionQueue())
        tenants = queue.batch if admission.service_class is ServiceClass.BATCH else queue.timely
        tenant = tenants.setdefault(admission.tenant, _TenantQueue())
        if not tenant.waiting:
            tenant.served = max(tenant.served, queue.served)
        heapq.heappush(tenant.waiting, (admission.deadline, next(self._sequence), admission))
        queue.keys[admission.key] = admission
        queue.num_of[admission.tenant] = queue.num_of.get(admission.tenant, 0) + 1
        queue.num_prefill_tokens += admission.num_prefill_tokens
        self._version_of[admission.key] = admission.version_id

    def remove(self, key: AttemptKey) -> Admission | None:
        version_id = self._version_of.pop(key, None)
        if version_id is None:
            return None
        queue = self._queues[version_id]
        admission = queue.keys.pop(key)
        queue.num_of[admission.tenant] -= 1
        queue.num_prefill_tokens -= admission.num_prefill_tokens
        if not queue.num_of[admission.tenant]:
            del queue.num_of[admission.tenant]
        if not queue.keys:
            del self._queues[version_id]
        return admission

    def take(self, admission: Admission) -> None:
        """The request is placed: its tenant has been served."""
        queue = self._queues[admission.version_id]
        for tenants in (queue.timely, queue.batch):
            if (tenant := tenants.get(admission.tenant)) is not None and tenant.waiting:
                queue.served = max(queue.served, tenant.served)
                tenant.served += admission.num_prefill_tokens / admission.weight
        self.remove(admission.key)

    def next(self, version_id: str, now: float, skipped: frozenset[AttemptKey] = frozenset()) -> Admission | None:
        """Who is to be placed next, but for those skipped."""
        queue = self._queues.get(version_id)
        if queue is None:
            return None
        overdue = self._head(queue, queue.batch, skipped)
        if overdue is not None and overdue.deadline - now <= self._batch_lead_s:
            return overdue
        return self._head(queue, queue.timely, skipped) or overdue

    def _head(
        self, queue: _VersionQueue, tenants: dict[str, _TenantQueue], skipped: frozenset[AttemptKey]
    ) -> Admission | None:
        best: tuple[float, float, int] | None = None
        found = None
        for name, tenant in list(tenants.items()):
            waiting = tenant.waiting
            while waiting and waiting[0][2] is not queue.keys.get(waiting[0][2].key):
                heapq.heappop(waiting)
            if not waiting:
                del tenants[name]
                continue
            entry = waiting[0] if waiting[0][2].key not in skipped else self._first(queue, waiting, skipped)
            if entry is not None and (best is None or (tenant.served, *entry[:2]) < best):
                best, found = (tenant.served, *entry[:2]), entry[2]
        return found

    @staticmethod
    def _first(queue: _VersionQueue, waiting: list[_Entry], skipped: frozenset[AttemptKey]) -> _Entry | None:
        staying = (one for one in waiting if one[2].key not in skipped and one[2] is queue.keys.get(one[2].key))
        return min(staying, default=None, key=lambda one: one[:2])

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
