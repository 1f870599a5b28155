"""The packs that each store is told to retain: in RAM the kept copies of packs in demand, and an order on disk.

A command is a lease, and carries the order of eviction. Without a scheduler it expires, and the store evicts what it
used least recently.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from torchrelay.scheduler.policy.cluster.membership import Membership
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.effects import RetainCommand
from torchrelay.scheduler.policy.replication.copies import Copies
from torchrelay.scheduler.policy.replication.worth import UNKNOWN
from torchrelay.scheduler.policy.types import StoreStatus

_MAX_STORES: Final = 8  # per call
_RETRY_S: Final = 2.0  # after a refusal


@dataclass(frozen=True)
class _Lease:
    incarnation: str
    is_empty: bool
    renew_at: float


class Retention:
    """The leases of all stores. Owned by the state."""

    def __init__(self, config: PolicyConfig, membership: Membership, copies: Copies) -> None:
        self._config, self._membership, self._copies = config, membership, copies
        self._leases: dict[str, _Lease] = {}
        self._rotation: list[str] = []  # stores that this rotation has not looked at

    def commands(self, now: float) -> Iterator[RetainCommand]:
        """Yields the commands that are due: to stores whose kept packs changed, and to stores whose lease is to be
        renewed, of which each call looks at a few.
        """
        changed = self._copies.kept_copies.changed_stores
        due = dict.fromkeys(islice(changed, _MAX_STORES), True)
        for store_id in due:
            del changed[store_id]
        self._rotation = self._rotation or list(self._membership.stores)
        while self._rotation and len(due) < _MAX_STORES:
            due.setdefault(self._rotation.pop(), False)
        for store_id, is_changed in due.items():
            store, lease = self._membership.stores.get(store_id), self._leases.get(store_id)
            if store is None:
                self._leases.pop(store_id, None)
            elif is_changed or lease is None or lease.renew_at <= now:
                yield from self._renew(store, lease, now)

    def _renew(self, store: StoreStatus, lease: _Lease | None, now: float) -> Iterator[RetainCommand]:
        """Yields the store's command, unless it has nothing to retain or to let go."""
        packs, disk_packs = self._packs_of(store), self._disk_order_of(store)
        if lease is not None and lease.incarnation == store.incarnation:
            retains_any = not lease.is_empty
        else:
            retains_any = any(copy.retained for copy in store.copies.values())
        self._leases[store.store_id] = _Lease(store.incarnation, not packs, now + self._config.retention_s / 3)
        if packs or disk_packs or retains_any:
            yield RetainCommand(store.store_id, packs, self._config.retention_s, disk_packs)

    def _packs_of(self, store: StoreStatus) -> tuple[str, ...]:
        """The packs that the store keeps, in the order of eviction: first packs that are kept elsewhere too, then packs
        with no other kept copy, each group by rising worth.
        """

        def rank(pack_id: str) -> tuple[bool, float, float, str]:
            pack = self._copies.packs[pack_id]
            return pack.kept[0] == store.store_id, pack.worth.in_ram, pack.last_used, pack_id

        return tuple(sorted(self._copies.kept_copies.on(store.store_id), key=rank))

    def _disk_order_of(self, store: StoreStatus) -> tuple[str, ...]:
        """The packs on the store's disk and its copies in RAM, which it may write to disk next, by rising worth."""
        if store.disk_pack_ids is None:
            return ()
        packs, pack_ids = self._copies.packs, store.disk_pack_ids | store.copies.keys()
        known = [(pack_id, packs[pack_id]) for pack_id in pack_ids if pack_id in packs]
        evaluated = (
            (pack.worth.on_disk, pack.last_used, pack_id) for pack_id, pack in known if pack.worth is not UNKNOWN
        )
        return tuple(pack_id for _, _, pack_id in sorted(evaluated))

    def refused(self, store_id: str, now: float) -> None:
        """Schedules a retry for a store that did not accept its lease."""
        if lease := self._leases.get(store_id):
            self._leases[store_id] = replace(lease, renew_at=now + _RETRY_S)
