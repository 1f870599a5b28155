"""Requests whose tenants take turns (``common.fair_queue``), charged by prompt tokens.

The tenant's request with the earliest deadline that can still be met is first. Late requests follow when none of these
waits, in an order of their own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from torchrelay.common.fair_queue import StartTags
from torchrelay.scheduler.policy.types import Admission, AttemptKey

Entry = tuple[float, int, AttemptKey]  # deadline, or rank if late; order of arrival; key


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
        """The first entry; there must be one."""
        return self._ordered[0]

    def first_few(self, number: int) -> list[AttemptKey]:
        return [entry[2] for entry in self._ordered[:number]]

    def check_integrity(self) -> None:
        """Raises ``AssertionError``."""
        assert self._ordered == sorted(self._by_key.values())


@dataclass(slots=True)
class _TenantRequests:
    """A tenant's requests; ``late``: requests whose deadline cannot be met."""

    timely: OrderedRequests = field(default_factory=OrderedRequests)
    late: OrderedRequests = field(default_factory=OrderedRequests)

    def __len__(self) -> int:
        return len(self.timely) + len(self.late)

    def first(self) -> Entry:
        """The tenant's next request; there must be one."""
        return (self.timely if len(self.timely) else self.late).first()

    def fall_late(self, admission: Admission, rank: float) -> bool:
        """Returns False if the request was late already."""
        if admission.key in self.late:
            return False
        _, sequence, key = self.timely.remove(admission.key)
        self.late.push((rank, sequence, key))
        return True

    def remove(self, key: AttemptKey) -> None:
        (self.late if key in self.late else self.timely).remove(key)


class DeadlineQueue:
    """Requests in the order of service, by their keys; its owner holds the admissions."""

    def __init__(self) -> None:
        self._tenants: dict[str, _TenantRequests] = {}  # with requests
        self._tags = StartTags()

    @property
    def has_debts(self) -> bool:
        return self._tags.has_debts

    def push(self, admission: Admission, sequence: int) -> None:
        name = admission.tenant
        if name not in self._tenants:
            self._tenants[name] = _TenantRequests()
            self._tags.join(name)
        self._tenants[name].timely.push((admission.deadline, sequence, admission.key))

    def remove(self, admission: Admission) -> None:
        tenant = self._tenants[admission.tenant]
        tenant.remove(admission.key)
        if not len(tenant):
            del self._tenants[admission.tenant]

    def take(self, admission: Admission) -> None:
        """Removes a request that is served now, and charges its tenant."""
        self._tags.serve(admission.tenant, admission.num_prefill_tokens)
        self.remove(admission)

    def fall_late(self, admission: Admission, rank: float) -> bool:
        """Marks the request as late: its tenant's timely requests come first, and late ones in the order of ``rank``.

        Returns False if the request was late already.
        """
        return self._tenants[admission.tenant].fall_late(admission, rank)

    def first_timely(self, tenant: str, number: int) -> list[AttemptKey]:
        """The tenant's timely requests with the earliest deadlines."""
        return self._tenants[tenant].timely.first_few(number)

    @property
    def share(self) -> float:
        """Each tenant's share of the service, while all tenants that have requests now continue to have some."""
        return 1 / len(self._tenants)

    def refund(self, admission: Admission) -> None:
        """Undoes the charge for a request, because its tenant was not served."""
        self._tags.refund(admission.tenant, admission.num_prefill_tokens)

    def first(self) -> AttemptKey | None:
        """The next request."""
        heads = ((self._tags[name], tenant.first()) for name, tenant in self._tenants.items())
        best = min(heads, default=None)
        return best[1][2] if best is not None else None

    def earliest(self) -> Entry | None:
        """The timely request with the earliest deadline, of all tenants."""
        timely = (tenant.timely for tenant in self._tenants.values())
        return min((requests.first() for requests in timely if len(requests)), default=None)

    def check_integrity(self) -> None:
        """Raises ``AssertionError``."""
        for tenant in self._tenants.values():
            assert len(tenant)
            tenant.timely.check_integrity()
            tenant.late.check_integrity()
