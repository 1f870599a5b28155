"""Requests that wait for a placement, by model version: which is next, and which must leave when a queue is full.

The next request comes from the tenant that was served least, among tenants with requests that are not batch work: its
timely request with the earliest deadline, or without one a late request. Batch work is next only if no other request
waits; once its own deadline is near, it is no longer batch work. A request that cannot be placed now is *parked*: it
waits like the others and keeps its position, but is not next. A full queue refuses requests of the tenant that has most
of its places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

from torchrelay.common.recent import Recent
from torchrelay.scheduler.policy.admission.deadline_queue import DeadlineQueue
from torchrelay.scheduler.policy.admission.place_rate import PlaceRate
from torchrelay.scheduler.policy.types import MAX_VERSIONS, Admission, AttemptKey, ServiceClass

_MAX_MOVED = 1024  # taken requests whose fair queue is remembered, in case they are refunded


@dataclass(slots=True)
class _Waiting:
    admission: Admission
    sequence: int
    fair_queue: DeadlineQueue | None = None  # the queue in which it waits for its turn; None: it is parked
    late_rank: float | None = None  # None: its deadline can be met

    def join(self, fair_queue: DeadlineQueue) -> None:
        self.leave()
        fair_queue.push(self.admission, self.sequence)
        self.fair_queue = fair_queue
        if self.late_rank is not None:
            fair_queue.fall_late(self.admission, self.late_rank)

    def leave(self) -> None:
        if self.fair_queue is not None:
            self.fair_queue.remove(self.admission)
            self.fair_queue = None


@dataclass(slots=True)
class _VersionQueue:
    """The queue of one version. ``waiting``: in order of arrival."""

    waiting: dict[AttemptKey, _Waiting] = field(default_factory=dict)
    timely: DeadlineQueue = field(default_factory=DeadlineQueue)
    batch: DeadlineQueue = field(default_factory=DeadlineQueue)
    num_of: dict[str, int] = field(default_factory=dict)  # waiting requests, by tenant
    num_prefill_tokens: int = 0

    def enter(self, request: _Waiting) -> None:
        request.join(self.fair_queue_of(request.admission) if request.late_rank is None else self.timely)

    def fair_queue_of(self, admission: Admission) -> DeadlineQueue:
        return self.batch if admission.service_class is ServiceClass.BATCH else self.timely

    def oldest_late(self, tenant: str) -> Admission | None:
        """The tenant's late request that waits longest."""
        late = (request.admission for request in self.waiting.values() if request.late_rank is not None)
        return next((admission for admission in late if admission.tenant == tenant), None)

    def last_without_token(self, tenant: str) -> Admission | None:
        """The tenant's last request that may be evicted; never a request that is streaming or was recalled."""
        latest = (
            request.admission for request in reversed(self.waiting.values()) if request.admission.tenant == tenant
        )
        return next((request for request in latest if not request.num_forced_tokens and not request.was_recalled), None)


def _crowd(num_of: Mapping[str, int], newcomer: str) -> str | None:
    """The tenant with most requests, if it has at least two more than the newcomer's tenant."""
    tenant, most = max(num_of.items(), key=lambda item: (item[1], item[0]))
    return tenant if tenant != newcomer and most > num_of.get(newcomer, 0) + 1 else None


class AdmissionQueues:
    """The queues of all versions. ``limit``: per version; ``limit_total``: for all; ``batch_lead_s``: how long before
    its deadline batch work stops to be batch work; ``debt_s``: how long a version's empty queue remembers which tenants
    were served more than others.
    """

    def __init__(self, limit: int, limit_total: int, batch_lead_s: float = 30.0, debt_s: float = 30.0) -> None:
        self._limit, self._limit_total = limit, limit_total
        self._batch_lead_s, self._debt_s = batch_lead_s, debt_s
        self._queues: dict[str, _VersionQueue] = {}  # queues that are not empty
        self._emptied: dict[
            str, tuple[float, _VersionQueue]
        ] = {}  # empty queues with debts, in the order of these times
        self._version_of: dict[AttemptKey, str] = {}
        self._num_of: Counter[str] = Counter()  # waiting requests, by tenant
        self._moved: Recent[AttemptKey, DeadlineQueue] = Recent(_MAX_MOVED)  # batch work taken after its lead time
        self._place_rates: Recent[str, PlaceRate] = Recent(MAX_VERSIONS)  # by version
        self._sequence = count()

    def __len__(self) -> int:
        return len(self._version_of)

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._version_of

    def __iter__(self) -> Iterator[Admission]:
        for queue in self._queues.values():
            for request in queue.waiting.values():
                yield request.admission

    def displaced_by(self, admission: Admission) -> Admission | None:
        """The request to refuse so that ``admission`` can wait: None, a request of the tenant with most requests, or
        ``admission`` itself. In the model's queue, a late request goes before a request that may be in time.
        """
        version_id, tenant = admission.version_id, admission.tenant
        if self.num_waiting(version_id) >= self._limit:
            queue = self._queues[version_id]
            if (crowd := _crowd(queue.num_of, tenant)) is None:
                return queue.oldest_late(tenant) or admission
            return queue.oldest_late(crowd) or queue.last_without_token(crowd) or admission
        if len(self._version_of) < self._limit_total:
            return None
        if (crowd := _crowd(self._num_of, tenant)) is None:
            return admission
        queues = (queue for queue in self._queues.values() if crowd in queue.num_of)
        longest_first = sorted(queues, key=lambda queue: -queue.num_of[crowd])
        evictable = (queue.last_without_token(crowd) for queue in longest_first)
        return next((request for request in evictable if request is not None), admission)

    def push(self, admission: Admission) -> None:
        """Adds a request. The caller must have removed the request that ``displaced_by`` names."""
        assert admission.key not in self._version_of
        queue = self._queues.get(admission.version_id)
        if queue is None:
            emptied = self._emptied.pop(admission.version_id, None)
            queue = self._queues[admission.version_id] = _VersionQueue() if emptied is None else emptied[1]
        queue.waiting[admission.key] = request = _Waiting(admission, next(self._sequence))
        queue.enter(request)
        tenant = admission.tenant
        queue.num_of[tenant] = queue.num_of.get(tenant, 0) + 1
        queue.num_prefill_tokens += admission.num_prefill_tokens
        self._version_of[admission.key] = admission.version_id
        self._num_of[tenant] += 1

    def remove(self, key: AttemptKey, now: float) -> Admission | None:
        if key not in self._version_of:
            return None
        self.park(key)
        return self._forget(key, now)

    def take(self, key: AttemptKey, now: float) -> None:
        """Removes a request that is placed and charges its tenant for it. The request must not be parked."""
        queue = self._queues[version_id := self._version_of[key]]
        request = queue.waiting[key]
        assert request.fair_queue is not None
        request.fair_queue.take(request.admission)
        if request.fair_queue is not queue.fair_queue_of(request.admission):
            self._moved[key] = request.fair_queue
        rate = self._place_rates.get(version_id) or PlaceRate()
        self._place_rates[version_id] = rate
        rate.take(now, is_last=len(queue.waiting) == 1)
        self._forget(key, now)

    def fall_late(self, key: AttemptKey, rank: float) -> bool:
        """Marks a request, which must not be parked, as late: its tenant's timely requests come first, and among late
        requests the lower ``rank``. It is no longer batch work. False if it was marked already.
        """
        queue = self._queues[self._version_of[key]]
        request = queue.waiting[key]
        if request.fair_queue is queue.batch:
            request.join(queue.timely)
        assert request.fair_queue is not None
        is_new = request.late_rank is None
        if is_new:
            request.late_rank = rank
            request.fair_queue.fall_late(request.admission, rank)
        return is_new

    def timely_beside(self, key: AttemptKey, number: int) -> tuple[list[Admission], float]:
        """Timely requests of the same tenant and version, up to ``number`` with the earliest deadlines, and the
        tenant's share of the service. The request ``key`` must not be parked.
        """
        queue = self._queues[self._version_of[key]]
        request = queue.waiting[key]
        assert request.fair_queue is not None
        tenant = request.admission.tenant
        keys = request.fair_queue.first_timely(tenant, number)
        return [queue.waiting[key].admission for key in keys], request.fair_queue.share

    def refund(self, admission: Admission) -> None:
        """Undoes the charge for a request that was taken and returns, because its tenant was not served."""
        if (fair_queue := self._moved.pop(admission.key, None)) is not None:
            fair_queue.refund(admission)
            return
        _, queue = self._emptied.get(admission.version_id, (0.0, self._queues.get(admission.version_id)))
        if queue is not None:
            queue.fair_queue_of(admission).refund(admission)

    def _forget(self, key: AttemptKey, now: float) -> Admission:
        """Removes a request that is in no fair queue any more."""
        version_id = self._version_of.pop(key)
        queue = self._queues[version_id]
        admission = queue.waiting.pop(key).admission
        tenant = admission.tenant
        queue.num_of[tenant] -= 1
        queue.num_prefill_tokens -= admission.num_prefill_tokens
        if not queue.num_of[tenant]:
            del queue.num_of[tenant]
        self._num_of[tenant] -= 1
        if not self._num_of[tenant]:
            del self._num_of[tenant]
        if not queue.waiting:
            del self._queues[version_id]
            if (rate := self._place_rates.get(version_id)) is not None:
                rate.emptied()
            if queue.timely.has_debts or queue.batch.has_debts:
                self._emptied[version_id] = (now, queue)
        return admission

    def park(self, key: AttemptKey) -> None:
        """Makes the request wait without being next until ``unpark``. No effect if it does not wait or is parked."""
        if (version_id := self._version_of.get(key)) is None:
            return
        self._queues[version_id].waiting[key].leave()

    def unpark(self, key: AttemptKey) -> None:
        """Returns a parked request to its position. No effect if it does not wait or is not parked."""
        if (version_id := self._version_of.get(key)) is None:
            return
        queue = self._queues[version_id]
        if (request := queue.waiting[key]).fair_queue is None:
            queue.enter(request)

    def forget_debts(self, now: float) -> None:
        """Drops the debts of versions whose queues have been empty for ``debt_s``."""
        for version_id, (emptied_at, _) in list(self._emptied.items()):
            if now - emptied_at < self._debt_s:
                break
            del self._emptied[version_id]

    @property
    def num_remembered(self) -> int:
        """Number of empty queues with debts."""
        return len(self._emptied)

    def next(self, version_id: str, now: float) -> Admission | None:
        """The request to place next."""
        queue = self._queues.get(version_id)
        if queue is None:
            return None
        while (earliest := queue.batch.earliest()) is not None and earliest[0] - now <= self._batch_lead_s:
            queue.waiting[earliest[2]].join(queue.timely)
        first = queue.timely.first() or queue.batch.first()
        return queue.waiting[first].admission if first is not None else None

    def waiting(self, version_id: str) -> tuple[Admission, ...]:
        """The version's queue, in order of arrival."""
        queue = self._queues.get(version_id)
        return tuple(request.admission for request in queue.waiting.values()) if queue is not None else ()

    def num_waiting(self, version_id: str) -> int:
        queue = self._queues.get(version_id)
        return len(queue.waiting) if queue is not None else 0

    def num_of_tenant(self, version_id: str, tenant: str) -> int:
        queue = self._queues.get(version_id)
        return queue.num_of.get(tenant, 0) if queue is not None else 0

    def num_prefill_tokens(self, version_id: str) -> int:
        """Prefill tokens of all requests that wait for the version."""
        queue = self._queues.get(version_id)
        return queue.num_prefill_tokens if queue is not None else 0

    def places_per_s(self, version_id: str, now: float) -> float | None:
        """Rate at which the version's non-empty queue frees places; None if not measured recently."""
        rate = self._place_rates.get(version_id)
        return rate.per_s(now) if rate is not None else None

    def oldest_wait_s(self, version_id: str, now: float) -> float:
        queue = self._queues.get(version_id)
        return now - next(iter(queue.waiting.values())).admission.admitted_at if queue is not None else 0.0

    def others_wait(self, version_id: str) -> bool:
        """Whether requests wait for any other version."""
        return len(self._queues) > (version_id in self._queues)

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions with waiting admissions."""
        return tuple(self._queues)

    def check_integrity(self) -> None:
        """Raises ``AssertionError``."""
        assert sum(len(queue.waiting) for queue in self._queues.values()) == len(self._version_of)
        assert self._num_of == sum((Counter(queue.num_of) for queue in self._queues.values()), Counter[str]())
        for queue in (*self._queues.values(), *(queue for _, queue in self._emptied.values())):
            assert sum(queue.num_of.values()) == len(queue.waiting)
            queue.timely.check_integrity()
            queue.batch.check_integrity()
