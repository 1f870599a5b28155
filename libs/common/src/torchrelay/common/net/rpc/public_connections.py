"""Which connections of a public gRPC port make room for a new one. Pure: it closes nothing itself.

A connection is keyless until a call on it has shown a valid key. Where room is needed, the address with most of the
keyless ones loses its oldest, since whoever has a key shows it at once. A tenant's key keeps half of all places at
most: beyond these its connections make room like keyless ones.
"""

from __future__ import annotations

from collections import Counter


class PublicConnections:
    """The open connections, by name. Methods ignore one that was chosen to be closed."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._addresses: dict[str, str] = {}  # of the keyless
        self._keyless_at: dict[str, dict[str, None]] = {}  # by address; oldest first
        self._tenants: dict[str, str] = {}  # of those with a key
        self._num_of_tenant: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._addresses) + len(self._tenants)

    def add(self, name: str, address: str) -> str | None:
        """Takes in a new connection. Returns which must be closed, if any: another, or the new one itself."""
        self._addresses[name] = address
        self._keyless_at.setdefault(address, {})[name] = None
        if len(self) <= self._limit:
            return None
        most = max(self._keyless_at, key=lambda one: len(self._keyless_at[one]))
        victim = next(iter(self._keyless_at[most]))
        self.remove(victim)
        return victim

    def show_key(self, name: str, tenant_id: str) -> None:
        """A call on the connection has shown a valid key of the tenant."""
        if self._num_of_tenant[tenant_id] < max(1, self._limit // 2) and self._remove_keyless(name):
            self._tenants[name] = tenant_id
            self._num_of_tenant[tenant_id] += 1

    def remove(self, name: str) -> None:
        self._remove_keyless(name)
        if (tenant_id := self._tenants.pop(name, None)) is not None:
            self._num_of_tenant -= Counter((tenant_id,))  # forgets who has none

    def _remove_keyless(self, name: str) -> bool:
        if (address := self._addresses.pop(name, None)) is None:
            return False
        same_address = self._keyless_at[address]
        del same_address[name]
        if not same_address:
            del self._keyless_at[address]
        return True
