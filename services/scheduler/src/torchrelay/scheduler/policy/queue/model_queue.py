"""Requests that wait for a placement, by model version: which is next, and which must leave when a queue is full.

Tenants take turns by start-time fair queueing (``common.fair_queue``), charged by prompt tokens. The next request comes
from the tenant that was served least, among tenants with requests that are not batch work: its request with the
earliest deadline that can be met, or without one a late request. Batch work is next only if no other request waits;
once its own deadline is near, or it is late, it is no longer batch work. A request that cannot be placed now is
*parked*: it waits like the others and keeps its position, but is not next. Of a model at its limits all requests are
*held*, which is parked in an order, and the first is released for each try, with the first of its batch work. A full
queue refuses requests of the tenant that has most of its places.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from torchrelay.common.fair_queue import StartTags
from torchrelay.common.recent import Recent
from torchrelay.scheduler.policy.types import MAX_VERSIONS, Admission, AttemptKey, ServiceClass

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
_BATCH_LEAD_S = 30.0  # how long before its deadline batch work stops to be batch work
_DEBT_S = 30.0  # how long an empty queue remembers which tenants were served more than others
_MAX_MOVED = 1024  # taken requests whose turns are remembered, in case they are refunded
_WINDOW_S = 10.0  # older measurements of placements are halved, repeatedly
_MIN_PLACES = 16  # fewer placements are never halved
_UNKNOWN_S = 60.0  # after this time without a placement, an empty queue has no known rate

_Entry = tuple[float, int, "_Request"]  # deadline, or rank if late; order of arrival
_HeldEntry = tuple[bool, bool, float, int, "_Request"]  # whether it is batch work; whether it is late; as above


@dataclass(slots=True, eq=False)
class _Request:
    admission: Admission
    sequence: int
    queue: _ModelQueue
    turns: _Turns | None = None  # in which it waits; None: it is parked
    late_rank: float | None = None  # None: its deadline can be met
    held_at: _HeldEntry | None = None  # where it is held

    @property
    def is_late(self) -> bool:
        return self.late_rank is not None

    @property
    def entry(self) -> _Entry:
        return self.admission.deadline if self.late_rank is None else self.late_rank, self.sequence, self

    def enter(self) -> None:
        """Waits for its turn, unless it does already."""
        if self.turns is None:
            self.join(self.queue.timely if self.is_late else self.queue.turns_of(self.admission))

    def join(self, turns: _Turns) -> None:
        self.leave()
        tenant = self.admission.tenant
        if tenant not in turns.requests:
            turns.requests[tenant] = [], []
            turns.tags.join(tenant)
        insort(turns.requests[tenant][self.is_late], self.entry)
        self.turns = turns

    def hold(self) -> None:
        is_batch = self.turns is self.queue.batch
        self.leave()
        self.held_at = (is_batch, self.is_late, *self.entry)
        insort(self.queue.held.setdefault(self.admission.model, []), self.held_at)

    def leave(self) -> None:
        if self.held_at is not None:
            held = self.queue.held[self.admission.model]
            del held[bisect_left(held, self.held_at)]
            self.held_at = None
            if not held:
                del self.queue.held[self.admission.model]
        if self.turns is not None:
            own = self.turns.requests[self.admission.tenant]
            del own[self.is_late][bisect_left(own[self.is_late], self.entry)]
            if not any(own):
                del self.turns.requests[self.admission.tenant]
            self.turns = None


class _Turns:
    """Tenants that take turns, each with its requests in time and its late requests, in their orders."""

    def __init__(self) -> None:
        self.requests: dict[str, tuple[list[_Entry], list[_Entry]]] = {}  # by tenant
        self.tags = StartTags()

    def first(self) -> _Request | None:
        heads = ((self.tags[tenant], (timely or late)[0]) for tenant, (timely, late) in self.requests.items())
        best = min(heads, default=None)
        return best[1][2] if best is not None else None

    def earliest(self) -> _Request | None:
        """The request with the earliest deadline that can be met, of all tenants."""
        first = min((timely[0] for timely, _ in self.requests.values() if timely), default=None)
        return first[2] if first is not None else None


@dataclass(slots=True)
class _PlaceRate:
    """Rate of placements, counted only while requests wait: an empty queue shows its clients' rate, not its
    instances'.
    """

    _num_freed: float = 0.0
    _during_s: float = 0.0
    _last_at: float = 0.0  # time of the last placement
    _began_at: float | None = None  # time of the first placement since the queue was empty

    def take(self, now: float) -> None:
        """Counts a placement."""
        if self._began_at is None:
            self._began_at = now
        elif now > self._began_at:  # placements at the first instant do not show a rate
            if now > self._last_at and self._during_s > _WINDOW_S and self._num_freed > _MIN_PLACES:
                self._during_s /= 2
                self._num_freed /= 2
            self._during_s += now - self._last_at
            self._num_freed += 1
        self._last_at = now

    def emptied(self) -> None:
        """Stops the measurement, because no request waits any more."""
        self._began_at = None

    def per_s(self, now: float) -> float | None:
        if not self._num_freed or (self._began_at is None and now - self._last_at > _UNKNOWN_S):
            return None
        return self._num_freed / (self._during_s + (now - self._last_at if self._began_at is not None else 0.0))


@dataclass(slots=True, eq=False)
class _ModelQueue:
    """The queue of one version."""

    requests: dict[AttemptKey, _Request] = field(default_factory=dict)  # in order of arrival
    num_of: Counter[str] = field(default_factory=Counter)  # requests by tenant
    num_prefill_tokens: int = 0
    timely: _Turns = field(default_factory=_Turns)
    batch: _Turns = field(default_factory=_Turns)
    held: dict[str, list[_HeldEntry]] = field(default_factory=dict)  # by model
    rate: _PlaceRate = field(default_factory=_PlaceRate)
    retry_at: float = 0.0  # the last retry time that a refused client was told
    empty_since: float = 0.0

    def turns_of(self, admission: Admission) -> _Turns:
        return self.batch if admission.service_class is ServiceClass.BATCH else self.timely

    def next(self, now: float) -> _Request | None:
        while (earliest := self.batch.earliest()) and earliest.admission.deadline - now <= _BATCH_LEAD_S:
            earliest.join(self.timely)
        return self.timely.first() or self.batch.first()

    def oldest_late(self, tenant: str) -> Admission | None:
        """The tenant's late request that waits longest."""
        late = (request.admission for request in self.requests.values() if request.is_late)
        return next((admission for admission in late if admission.tenant == tenant), None)

    def last_without_token(self, tenant: str) -> Admission | None:
        """The tenant's last request that may be refused; never a request that is streaming or was recalled."""
        latest = (request.admission for request in reversed(self.requests.values()))
        own = (admission for admission in latest if admission.tenant == tenant)
        return next((each for each in own if not each.num_forced_tokens and not each.was_recalled), None)


_EMPTY = _ModelQueue()


def _count_down(num_of: Counter[str], tenant: str) -> None:
    num_of[tenant] -= 1
    if not num_of[tenant]:
        del num_of[tenant]


def _crowd(num_of: Counter[str], newcomer: str) -> str | None:
    """The tenant with most requests, if it has at least two more than the newcomer's tenant."""
    tenant, most = max(num_of.items(), key=lambda item: (item[1], item[0]))
    return tenant if tenant != newcomer and most > num_of[newcomer] + 1 else None


class ModelQueues:
    """The queues of all versions. ``limit``: per version; ``limit_total``: for all."""

    def __init__(self, limit: int, limit_total: int) -> None:
        self._limit, self._limit_total = limit, limit_total
        self._queues: dict[str, _ModelQueue] = {}  # with requests, by version
        self._known: Recent[str, _ModelQueue] = Recent(MAX_VERSIONS)  # the same, and empty queues
        self._requests: dict[AttemptKey, _Request] = {}
        self._num_of: Counter[str] = Counter()  # waiting requests, by tenant
        self._moved: Recent[AttemptKey, _Turns] = Recent(_MAX_MOVED)  # batch work that was not when it was taken
        self._sequence = count()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._requests

    def __iter__(self) -> Iterator[Admission]:
        for queue in self._queues.values():
            for request in queue.requests.values():
                yield request.admission

    def displaced_by(self, admission: Admission) -> Admission | None:
        """The request to refuse so that ``admission`` can wait: None, a request of the tenant with most requests, or
        ``admission`` itself. In the model's queue, a late request goes before a request that may be in time.
        """
        tenant, queue = admission.tenant, self._of(admission.version_id)
        if len(queue.requests) >= self._limit:
            if (crowd := _crowd(queue.num_of, tenant)) is None:
                return queue.oldest_late(tenant) or admission
            return queue.oldest_late(crowd) or queue.last_without_token(crowd) or admission
        if len(self) < self._limit_total:
            return None
        if (crowd := _crowd(self._num_of, tenant)) is None:
            return admission
        longest_first = sorted(self._queues.values(), key=lambda queue: -queue.num_of[crowd])
        evictable = (queue.last_without_token(crowd) for queue in longest_first)
        return next((request for request in evictable if request is not None), admission)

    def push(self, admission: Admission, now: float) -> None:
        """Adds a request. The caller must have removed the request that ``displaced_by`` names."""
        assert admission.key not in self
        version_id, tenant = admission.version_id, admission.tenant
        if (queue := self._queues.get(version_id)) is None:
            queue = self._queues[version_id] = self._known[version_id] = self._known.get(version_id) or _ModelQueue()
            if now - queue.empty_since >= _DEBT_S:
                queue.timely, queue.batch = _Turns(), _Turns()
        request = _Request(admission, next(self._sequence), queue)
        self._requests[admission.key] = queue.requests[admission.key] = request
        request.enter()
        queue.num_of[tenant] += 1
        queue.num_prefill_tokens += admission.num_prefill_tokens
        self._num_of[tenant] += 1

    def remove(self, key: AttemptKey, now: float) -> Admission | None:
        if (request := self._requests.pop(key, None)) is None:
            return None
        request.leave()
        queue = request.queue
        del queue.requests[key]
        queue.num_prefill_tokens -= request.admission.num_prefill_tokens
        _count_down(queue.num_of, request.admission.tenant)
        _count_down(self._num_of, request.admission.tenant)
        if not queue.requests:
            del self._queues[request.admission.version_id]
            queue.rate.emptied()
            queue.empty_since = now
        return request.admission

    def take(self, key: AttemptKey, now: float) -> None:
        """Removes a request that is placed and charges its tenant for it. The request must not be parked."""
        request = self._requests[key]
        assert request.turns is not None
        request.turns.tags.serve(request.admission.tenant, request.admission.num_prefill_tokens)
        if request.turns is not request.queue.turns_of(request.admission):
            self._moved[key] = request.turns
        request.queue.rate.take(now)
        self.remove(key, now)

    def refund(self, admission: Admission) -> None:
        """Undoes the charge for a request that was taken and returns, because its tenant was not served."""
        turns = self._moved.pop(admission.key, None)
        if turns is None and (queue := self._known.get(admission.version_id)) is not None:
            turns = queue.turns_of(admission)
        if turns is not None:
            turns.tags.refund(admission.tenant, admission.num_prefill_tokens)

    def fall_late(self, key: AttemptKey, rank: float) -> bool:
        """Marks a request, which must not be parked, as late: its tenant's timely requests come first, and among late
        requests the lower ``rank``. It is no longer batch work. False if it was marked already.
        """
        request = self._requests[key]
        if request.is_late:
            return False
        turns = request.queue.timely
        if request.turns is not turns:
            request.join(turns)
        timely, late = turns.requests[request.admission.tenant]
        del timely[bisect_left(timely, request.entry)]
        request.late_rank = rank
        insort(late, request.entry)
        return True

    def timely_beside(self, key: AttemptKey, number: int) -> tuple[list[Admission], float]:
        """Timely requests of the same tenant and version, up to ``number`` with the earliest deadlines, and the
        tenant's share of the service, while all tenants that have requests continue to have some. The request ``key``
        must not be parked.
        """
        request = self._requests[key]
        assert request.turns is not None
        timely, _ = request.turns.requests[request.admission.tenant]
        return [other.admission for _, _, other in timely[:number]], 1 / len(request.turns.requests)

    def get(self, key: AttemptKey) -> Admission | None:
        """The waiting request; None if it does not wait."""
        request = self._requests.get(key)
        return None if request is None else request.admission

    def park(self, key: AttemptKey) -> None:
        """Makes the request wait without being next until ``unpark``. No effect if it does not wait or is parked."""
        if (request := self._requests.get(key)) is not None:
            request.leave()

    def hold(self, key: AttemptKey) -> None:
        """Parks the request, which waits, until it is the first held request of its model that ``release`` returns."""
        self._requests[key].hold()

    def held_models(self, version_id: str) -> tuple[str, ...]:
        """The models of the version that have held requests."""
        return tuple(self._of(version_id).held)

    def release(self, version_id: str, model: str) -> None:
        """Returns the model's first held request, and the first that is batch work, to their positions."""
        held = self._of(version_id).held.get(model, [])
        first_batch = bisect_left(held, (True,))
        for entry in (*held[:1], *held[first_batch : first_batch + 1]):
            entry[-1].enter()

    def unpark(self, key: AttemptKey) -> None:
        """Returns a parked request to its position. No effect if it does not wait or is not parked."""
        if (request := self._requests.get(key)) is not None:
            request.enter()

    def _of(self, version_id: str) -> _ModelQueue:
        return self._queues.get(version_id, _EMPTY)

    def next(self, version_id: str, now: float) -> Admission | None:
        """The request to place next."""
        request = self._of(version_id).next(now)
        return request.admission if request is not None else None

    def waiting(self, version_id: str) -> tuple[Admission, ...]:
        """The version's queue, in order of arrival."""
        return tuple(request.admission for request in self._of(version_id).requests.values())

    def num_waiting(self, version_id: str) -> int:
        return len(self._of(version_id).requests)

    def num_of_tenant(self, version_id: str, tenant: str) -> int:
        return self._of(version_id).num_of[tenant]

    def num_prefill_tokens(self, version_id: str) -> int:
        """Prefill tokens of all requests that wait for the version."""
        return self._of(version_id).num_prefill_tokens

    def oldest_wait_s(self, version_id: str, now: float) -> float:
        oldest = next(iter(self._of(version_id).requests.values()), None)
        return now - oldest.admission.admitted_at if oldest is not None else 0.0

    def others_wait(self, version_id: str) -> bool:
        """Whether requests wait for any other version."""
        return len(self._queues) > (version_id in self._queues)

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions with waiting requests."""
        return tuple(self._queues)

    def places_per_s(self, version_id: str, now: float) -> float | None:
        """Rate at which the version's non-empty queue frees places; None if not measured recently."""
        queue = self._known.get(version_id)
        return queue.rate.per_s(now) if queue is not None else None

    def retry_s(self, version_id: str, places_per_s: float, now: float) -> float:
        """Seconds after which the client refused now may retry, a place after the clients refused before."""
        queue = self._known.setdefault(version_id, _ModelQueue())
        after_s = max(queue.retry_at - now, 0.0) + 1 / places_per_s
        queue.retry_at = now + min(after_s, MAX_RETRY_S)
        return min(max(after_s, MIN_RETRY_S), MAX_RETRY_S)

    def check_integrity(self) -> None:
        """Raises ``AssertionError``."""
        assert sum(len(queue.requests) for queue in self._queues.values()) == len(self)
        assert self._num_of == sum((queue.num_of for queue in self._queues.values()), Counter[str]())
        for queue in (*self._queues.values(), *self._known.values()):
            for held in queue.held.values():
                assert held and held == sorted(held)
                assert all(entry[-1].held_at is entry and entry[-1].turns is None for entry in held)
            assert sum(queue.num_of.values()) == len(queue.requests)
            for turns in (queue.timely, queue.batch):
                for entries in (entries for of_tenant in turns.requests.values() for entries in of_tenant):
                    assert entries == sorted(entry for entry in entries if entry[2].turns is turns)
