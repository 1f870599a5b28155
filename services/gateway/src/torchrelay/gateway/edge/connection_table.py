"""Which connections a public port keeps, and which it closes for a new one. Pure: it closes nothing itself.

A connection is keyless until a request on it has shown a valid key. When there are too many keyless connections, the
address with most of them loses its oldest. When there are too many in all, the tenant with most idle connections loses
the longest idle if it has as many of them as there are keyless ones; otherwise the same address loses its oldest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)

OWN_DESCRIPTORS = 256  # used by the gateway itself: SQL, Redis, NATS, scheduler, stores, workers, pipes, files
GRPC_DESCRIPTORS = 3  # per connection: the client's, and both ends of the connection to grpcio


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Maximum numbers of connections at once. A tenant's connections beyond ``per_tenant`` are treated as keyless."""

    total: int = 8192
    keyless: int = 2048
    per_tenant: int | None = None  # None: no limit


def divide_descriptors(num_descriptors: int, rest: ConnectionLimits, num_grpc: int) -> tuple[ConnectionLimits, int]:
    """The limits of REST and gRPC connections that fit the process's limit of open files.

    REST gets at most three quarters of what the gateway itself leaves, and its keyless connections half of that.
    """
    available = max(num_descriptors - OWN_DESCRIPTORS, num_descriptors // 2)
    total = max(4, min(rest.total, available * 3 // 4))
    limits = ConnectionLimits(total, max(2, min(rest.keyless, total // 2)))
    return limits, max(1, min(num_grpc, available // 4 // GRPC_DESCRIPTORS))


class ConnectionTable(Generic[C]):
    """The open connections. Methods ignore a connection that ``add`` has chosen to be closed."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._keyless: dict[C, str] = {}  # address of each
        self._keyless_at: dict[str, dict[C, None]] = {}  # by address; oldest first
        self._tenants: dict[C, str] = {}  # first tenant whose key each connection has shown
        self._num_of_tenant: Counter[str] = Counter()
        self._idle: dict[str, dict[C, None]] = {}  # by tenant; longest idle first

    def __len__(self) -> int:
        return len(self._keyless) + len(self._tenants)

    @property
    def num_keyless(self) -> int:
        return len(self._keyless)

    def add(self, connection: C, address: str) -> C | None:
        """Adds a new connection. Returns the connection to close for it, if any: another, or the new one itself."""
        self._keyless[connection] = address
        self._keyless_at.setdefault(address, {})[connection] = None
        if len(self._keyless) > self._limits.keyless:
            victim = _first(_largest(self._keyless_at))
        elif len(self) > self._limits.total:
            idle = _largest(self._idle)
            victim = _first(idle if len(idle) >= len(self._keyless) else _largest(self._keyless_at))
        else:
            return None
        self.remove(victim)
        return victim

    def has_key(self, connection: C) -> bool:
        return connection in self._tenants

    def show_key(self, connection: C, tenant_id: str) -> None:
        """A request in progress on the connection has shown a valid key of the tenant."""
        limit = self._limits.per_tenant
        if connection in self._tenants:
            self.begin_request(connection)
        elif connection in self._keyless and (limit is None or self._num_of_tenant[tenant_id] < limit):
            self._remove_keyless(connection)
            self._tenants[connection] = tenant_id
            self._num_of_tenant[tenant_id] += 1

    def begin_request(self, connection: C) -> None:
        if (tenant_id := self._tenants.get(connection)) is not None:
            _discard(self._idle, tenant_id, connection)

    def end_request(self, connection: C) -> None:
        if (tenant_id := self._tenants.get(connection)) is not None:
            self._idle.setdefault(tenant_id, {})[connection] = None

    def remove(self, connection: C) -> None:
        if connection in self._keyless:
            self._remove_keyless(connection)
            return
        self.begin_request(connection)
        if (tenant_id := self._tenants.pop(connection, None)) is not None:
            self._num_of_tenant[tenant_id] -= 1
            if not self._num_of_tenant[tenant_id]:
                del self._num_of_tenant[tenant_id]

    def _remove_keyless(self, connection: C) -> None:
        _discard(self._keyless_at, self._keyless.pop(connection), connection)


def _largest(groups: dict[str, dict[C, None]]) -> dict[C, None]:
    """The largest group; an empty group if there is none."""
    return max(groups.values(), key=lambda group: len(group), default={})


def _first(group: dict[C, None]) -> C:
    return next(iter(group))


def _discard(groups: dict[str, dict[C, None]], name: str, connection: C) -> None:
    """Removes the connection from its group if it is there, and the group if it is then empty."""
    if (group := groups.get(name)) is not None:
        group.pop(connection, None)
        if not group:
            del groups[name]
