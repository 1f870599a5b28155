"""Start-time fair queueing between tenants (Goyal, Vin and Cheng, 1996); of one tenant the earliest deadline is first
that can still be met. Requests that will be late come after those, in an order of their own, and get a sixteenth of
what the tenant gets at least.

A tenant's *tag* is the service it got, in prompt tokens divided by its weight. The least tag is next. Virtual time is
the tag of whoever was served last; a tenant that returns starts there, or at its own tag if that is ahead: absence
neither saves up turns nor sheds a debt.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from torchrelay.scheduler.policy.core import Admission, AttemptKey

Entry = tuple[float, int, AttemptKey, int]  # by deadline, or rank of what is late, then by arrival; with its tokens

_TIMELY_PER_LATE = 15  # prompt tokens of requests in time for one of a late one, while a tenant has both
_MIN_DEBTS_SWEPT = 64


class OrderedRequests:
    """Requests in the order of their entries."""

    __slots__ = ("_by_key", "_ordered")

    def __init__(self) -> None:
        self._ordered: list[Entry] = []
        self._by_key: dict[AttemptKey, Entry] = {}

    def __len__(self) -> int:
        return len(self._ordered)

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._by_key

    def push(self, entry: Entry) -> None:
        insort(self._ordered, entry)
        self._by_key[entry[2]] = entry

    def remove(self, key: AttemptKey) -> Entry:
        entry = self._by_key.pop(key)
        del self._ordered[bisect_left(self._ordered, entry)]
        return entry

    def first(self) -> Entry:
        """Of at least one."""
        return self._ordered[0]

    def first_few(self, number: int) -> list[AttemptKey]:
        return [entry[2] for entry in self._ordered[:number]]

    def check_integrity(self) -> None:
        """Raises ``AssertionError``."""
        assert self._ordered == sorted(self._by_key.values())


@dataclass(slots=True)
class _Tenant:
    """``late``: those whose deadline is given up."""

    tag: float
    weight: float = 1.0
    timely: OrderedRequests = field(default_factory=OrderedRequests)
    late: OrderedRequests = field(default_factory=OrderedRequests)
    late_credit: int = 0  # prompt tokens of others that were served since the last late one

    def __len__(self) -> int:
        return len(self.timely) + len(self.late)

    def first(self) -> Entry:
        """Of at least one."""
        if not len(self.late):
            return self.timely.first()
        late = self.late.first()
        is_due = self.late_credit >= _TIMELY_PER_LATE * late[3] or not len(self.timely)
        return late if is_due else self.timely.first()

    def fall_late(self, admission: Admission, rank: float) -> bool:
        """False if it was late already."""
        if admission.key in self.late:
            return False
        _, sequence, key, num_tokens = self.timely.remove(admission.key)
        self.late.push((rank, sequence, key, num_tokens))
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
            self.late_credit = max(self.late_credit - _TIMELY_PER_LATE * num_tokens, 0)
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
        tenant.weight = admission.weight
        tenant.timely.push((admission.deadline, sequence, admission.key, admission.num_prefill_tokens))

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

    def fall_late(self, admission: Admission, rank: float) -> bool:
        """The request is late: those of its tenant that should not be are first, and of the others those of less
        ``rank``. False if that is known already.
        """
        return self._tenants[admission.tenant].fall_late(admission, rank)

    def first_timely(self, tenant: str, number: int) -> list[AttemptKey]:
        """The tenant's requests with the earliest deadlines, of those that should be in time."""
        return self._tenants[tenant].timely.first_few(number)

    def share(self, tenant: str) -> float:
        """Of what is served, as long as all tenants that have requests now go on to have some."""
        return self._tenants[tenant].weight / sum(one.weight for one in self._tenants.values())

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
        """The request with the earliest deadline of those that should be in time, whoever's turn it is."""
        timely = (tenant.timely for tenant in self._tenants.values())
        return min((requests.first() for requests in timely if len(requests)), default=None)

    def check_integrity(self) -> None:
        """Raises ``AssertionError``."""
        assert not self._tenants.keys() & self._debts.keys()
        for tenant in self._tenants.values():
            assert len(tenant)
            tenant.timely.check_integrity()
            tenant.late.check_integrity()
