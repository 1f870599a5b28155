"""Which connections the REST door keeps, and which it closes for a new one. Pure: it closes nothing itself.

A connection is keyless until a request on it has shown a valid key. Where room is needed, the oldest keyless one goes,
since whoever has a key shows it at once; else the one that has been idle longest, of the tenant with most of these.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)

OWN_DESCRIPTORS = 256  # of the gateway itself: SQL, Redis, NATS, scheduler, stores, workers, pipes, files
GRPC_DESCRIPTORS = 3  # of a connection: the client's, and both ends of the one that leads to grpcio


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Numbers of connections at once."""

    total: int = 8192
    keyless: int = 2048
    keyless_per_address: int = 1024


def divide_descriptors(num_descriptors: int, rest: ConnectionLimits, num_grpc: int) -> tuple[ConnectionLimits, int]:
    """The limits of the REST and the gRPC door that fit the process's limit of open files.

    REST gets at most three quarters of what the gateway itself leaves, and its keyless connections half of that.
    """
    available = max(num_descriptors - OWN_DESCRIPTORS, num_descriptors // 2)
    total = max(4, min(rest.total, available * 3 // 4))
    keyless = max(2, min(rest.keyless, total // 2))
    limits = ConnectionLimits(total, keyless, min(rest.keyless_per_address, keyless))
    return limits, max(1, min(num_grpc, available // 4 // GRPC_DESCRIPTORS))


class ConnectionTable(Generic[C]):
    """The open connections. Methods ignore a connection that was chosen to be closed."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._keyless: dict[C, str] = {}  # its address; oldest first
        self._keyless_at: dict[str, dict[C, None]] = {}  # by address; oldest first
        self._tenants: dict[C, str] = {}  # connections that have shown a key
        self._idle: dict[str, dict[C, None]] = {}  # by tenant; longest first

    def __len__(self) -> int:
        return len(self._keyless) + len(self._tenants)

    @property
    def num_keyless(self) -> int:
        return len(self._keyless)

    def add(self, connection: C, address: str) -> C | None:
        """Takes in a new connection. Returns which must be closed, if any: another, or the new one itself."""
        self._keyless[connection] = address
        same_address = self._keyless_at.setdefault(address, {})
        same_address[connection] = None
        limits = self._limits
        if len(same_address) > limits.keyless_per_address:
            victim = next(iter(same_address))
        elif len(self._keyless) > limits.keyless:
            victim = next(iter(self._keyless))
        elif len(self) > limits.total:
            victim = self._least_needed()
        else:
            return None
        self.remove(victim)
        return victim

    def _least_needed(self) -> C:
        oldest = next(iter(self._keyless))
        if len(self._keyless) > 1 or not self._idle:
            return oldest
        longest = max(self._idle, key=lambda tenant_id: len(self._idle[tenant_id]))
        return next(iter(self._idle[longest]))

    def has_key(self, connection: C) -> bool:
        return connection in self._tenants

    def show_key(self, connection: C, tenant_id: str) -> None:
        """A request on the connection has shown a valid key; it is in progress."""
        if connection in self._keyless:
            self._remove_keyless(connection)
            self._tenants[connection] = tenant_id
        elif connection in self._tenants:
            self.begin_request(connection)
            self._tenants[connection] = tenant_id

    def begin_request(self, connection: C) -> None:
        tenant_id = self._tenants.get(connection)
        if tenant_id is not None and (idle := self._idle.get(tenant_id)) is not None:
            idle.pop(connection, None)
            if not idle:
                del self._idle[tenant_id]

    def end_request(self, connection: C) -> None:
        if (tenant_id := self._tenants.get(connection)) is not None:
            self._idle.setdefault(tenant_id, {})[connection] = None

    def remove(self, connection: C) -> None:
        if connection in self._keyless:
            self._remove_keyless(connection)
        else:
            self.begin_request(connection)
            self._tenants.pop(connection, None)

    def _remove_keyless(self, connection: C) -> None:
        address = self._keyless.pop(connection)
        same_address = self._keyless_at[address]
        del same_address[connection]
        if not same_address:
            del self._keyless_at[address]
