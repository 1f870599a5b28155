"""Start-time fair queueing between tenants (Goyal, Vin and Cheng, 1996); of one tenant the earliest deadline is first
that can still be met. Requests that will be late come after those, but get an eighth of what the tenant gets at least.

A tenant's *tag* is the service it got, in prompt tokens divided by its weight. The least tag is next. Virtual time is
the tag of whoever was served last; a tenant that returns starts there, or at its own tag if that is ahead: absence
neither saves up turns nor sheds a debt.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from torchrelay.scheduler.policy.core import Admission, AttemptKey

Entry = tuple[float, int, AttemptKey]  # by deadline, then by arrival

_TIMELY_PER_LATE = 7  # prompt tokens of requests in time for one of a late one, while a tenant has both
_MIN_DEBTS_SWEPT = 64
_MAX_LEFT = 64  # entries of a heap whose requests have left, more than there are others


class DeadlineHeap:
    """Requests by deadline. Those that leave early are dropped when they come to the top, or when they are many."""

    __slots__ = ("_entries", "_heap")

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._entries: dict[AttemptKey, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._entries

    def push(self, entry: Entry) -> None:
        heapq.heappush(self._heap, entry)
        self._entries[entry[2]] = entry
        self._drop_left()

    def remove(self, key: AttemptKey) -> Entry:
        entry = self._entries.pop(key)
        self._drop_left()
        return entry

    def _drop_left(self) -> None:
        if len(self._heap) > 2 * len(self._entries) + _MAX_LEFT:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def first(self) -> Entry:
        """Of at least one."""
        while self._heap[0][2] not in self._entries:
            heapq.heappop(self._heap)
        return self._heap[0]

    def check_integrity(self) -> None:
        """Raises ``AssertionError``."""
        assert set(self._entries.values()) <= set(self._heap)
        assert len(self._heap) <= 2 * len(self._entries) + _MAX_LEFT, "what has left is kept"


@dataclass(slots=True)
class _Tenant:
    """``late``: those whose deadline can no longer be met."""

    tag: float
    timely: DeadlineHeap = field(default_factory=DeadlineHeap)
    late: DeadlineHeap = field(default_factory=DeadlineHeap)
    late_credit: int = 0  # prompt tokens of late requests that are due, times ``_TIMELY_PER_LATE``

    def __len__(self) -> int:
        return len(self.timely) + len(self.late)

    def first(self) -> Entry:
        """Of at least one."""
        is_late_due = len(self.late) and (self.late_credit > 0 or not len(self.timely))
        return (self.late if is_late_due else self.timely).first()

    def earliest(self) -> Entry:
        """Of at least one."""
        return min(heap.first() for heap in (self.timely, self.late) if len(heap))

    def fall_late(self, key: AttemptKey) -> bool:
        """False if it was late already."""
        if key in self.late:
            return False
        self.late.push(self.timely.remove(key))
        return True

    def remove(self, key: AttemptKey) -> None:
        (self.late if key in self.late else self.timely).remove(key)
        if not len(self.late):
            self.late_credit = 0

    def serve(self, admission: Admission) -> None:
        """Counts what it gets."""
        num_tokens = admission.num_prefill_tokens
        self.tag += num_tokens / admission.weight
        if admission.key in self.late:
            self.late_credit = max(self.late_credit - _TIMELY_PER_LATE * num_tokens, -_TIMELY_PER_LATE * num_tokens)
        elif len(self.late):
            self.late_credit += num_tokens


class FairQueue:
    """Requests whose tenants take turns. Its owner holds the admissions."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}  # those with requests
        self._debts: dict[str, float] = {}  # tags ahead of virtual time, of tenants without requests
        self._max_debts = _MIN_DEBTS_SWEPT  # then those that time has passed are looked for
        self._now = 0.0  # virtual time

    @property
    def has_debts(self) -> bool:
        return any(tag > self._now for tag in self._debts.values())

    def push(self, admission: Admission, sequence: int) -> None:
        name = admission.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tag = max(self._debts.pop(name, 0.0), self._now)
            tenant = self._tenants[name] = _Tenant(tag)
        tenant.timely.push((admission.deadline, sequence, admission.key))

    def remove(self, admission: Admission) -> None:
        name = admission.tenant
        tenant = self._tenants[name]
        tenant.remove(admission.key)
        if len(tenant):
            return
        del self._tenants[name]
        if tenant.tag > self._now:
            self._debts[name] = tenant.tag
            if len(self._debts) > self._max_debts:
                self._debts = {name: tag for name, tag in self._debts.items() if tag > self._now}
                self._max_debts = max(2 * len(self._debts), _MIN_DEBTS_SWEPT)

    def take(self, admission: Admission) -> None:
        """Removes a request that is served now: its tenant is charged."""
        tenant = self._tenants[admission.tenant]
        self._now = max(self._now, tenant.tag)
        tenant.serve(admission)
        self.remove(admission)

    def fall_late(self, admission: Admission) -> bool:
        """The request will be late whenever it is served: those of its tenant that will not be are first. False if that
        is known already.
        """
        return self._tenants[admission.tenant].fall_late(admission.key)

    def refund(self, admission: Admission) -> None:
        """What was taken is given back: its tenant was not served."""
        service = admission.num_prefill_tokens / admission.weight
        if (tenant := self._tenants.get(admission.tenant)) is not None:
            tenant.tag -= service
        elif admission.tenant in self._debts:
            self._debts[admission.tenant] -= service

    def first(self) -> AttemptKey | None:
        """The request whose turn it is."""
        best: tuple[float, Entry] | None = None
        for tenant in self._tenants.values():
            head = tenant.first()
            if best is None or (tenant.tag, head) < best:
                best = (tenant.tag, head)
        return best[1][2] if best is not None else None

    def earliest(self) -> Entry | None:
        """The request with the earliest deadline, whoever's turn it is."""
        return min((tenant.earliest() for tenant in self._tenants.values()), default=None)

    def check_integrity(self) -> None:
        """Raises ``AssertionError``."""
        assert not self._tenants.keys() & self._debts.keys()
        for tenant in self._tenants.values():
            assert len(tenant)
            tenant.timely.check_integrity()
            tenant.late.check_integrity()
