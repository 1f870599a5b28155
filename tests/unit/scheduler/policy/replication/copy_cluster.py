"""Stores with arenas, and the replicator over them, without the rest of the policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torchrelay.scheduler.policy.cluster.membership import Membership
from torchrelay.scheduler.policy.config import TURN_S, PolicyConfig
from torchrelay.scheduler.policy.effects import RetainCommand
from torchrelay.scheduler.policy.replication.copies import Copies, CopyKey, CopyOrder, evaluate_packs
from torchrelay.scheduler.policy.replication.retention import Retention
from torchrelay.scheduler.policy.replication.worth import PackWorth
from torchrelay.scheduler.policy.types import Model, PackCopy, StoreStatus

GB = 1 << 30
NUM_CHUNKS = 8


def a_copy(pack_id: str, num_bytes: int = GB, num_pins: int = 0, num_verified: int = NUM_CHUNKS) -> PackCopy:
    return PackCopy(pack_id, num_bytes, NUM_CHUNKS, num_verified, num_pins)


def a_store(name: str, *copies: PackCopy, domain: str = "", arena: int = 10 * GB) -> StoreStatus:
    return StoreStatus(name, f"{name} 1", name, "", "", 0.0, arena, {copy.pack_id: copy for copy in copies}, domain)


@dataclass
class CopyCluster:
    """The stores' last reports, and the commands that are in force."""

    config: PolicyConfig = field(default_factory=PolicyConfig)
    now: float = 10_000.0
    worths: dict[str, PackWorth] = field(default_factory=dict)  # of packs that are not worth the same as others
    under_way: list[CopyKey] = field(default_factory=list)
    commands: list[RetainCommand] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.membership = Membership(self.config.fence_s)
        self.copies = Copies(self.config, self.membership, self._worth)
        self.retention = Retention(self.config, self.membership, self.copies)

    def _worth(self, model: Model, last_used: float, now: float) -> PackWorth:
        return self.worths.get(model.pack_id, PackWorth(1 / (1 + now - last_used)))

    def report(self, *stores: StoreStatus) -> CopyCluster:
        for store in stores:
            before, store = self.stores.get(store.store_id), replace(store, seen_at=self.now)
            assert self.membership.accept_store(store)
            self.copies.observe(store, before, self.now)
        return self

    @property
    def stores(self) -> Mapping[str, StoreStatus]:
        return self.membership.stores

    def use(self, *pack_ids: str, ago_s: float = 1.0, num_bytes: int = GB) -> CopyCluster:
        """Each pack is used a second before the next, the last of them ``ago_s`` ago."""
        for rank, pack_id in enumerate(reversed(pack_ids)):
            self.copies.use(Model(pack_id, pack_id, pack_id, num_bytes, 0), self.now - ago_s - rank)
        return self

    def hold(self, store_id: str, pack_id: str, num_bytes: int = GB, **changes: int) -> None:
        store = self.stores[store_id]
        self.report(replace(store, copies={**store.copies, pack_id: a_copy(pack_id, num_bytes, **changes)}))

    def drop(self, store_id: str, pack_id: str) -> None:
        store = self.stores[store_id]
        self.report(replace(store, copies={key: copy for key, copy in store.copies.items() if key != pack_id}))

    def lose(self, store_id: str) -> StoreStatus:
        """The store is gone; its copies are lost if it does not come back within ``loss_grace_s``."""
        store = self.membership.drop_store(store_id, self.now, gone=False)
        assert store is not None
        self.copies.store_left(store, self.now)
        self.under_way = [key for key in self.under_way if key[1] != store_id]
        self.commands = [command for command in self.commands if command.store_id != store_id]
        return store

    def step(self, seconds: float = TURN_S) -> list[CopyOrder]:
        """A turn of the policy. Copies stay under way until they are ended."""
        self.now += seconds
        orders = evaluate_packs(self.copies, self.copies.due(self.now), self.under_way, self.now)
        self.under_way += [(order.pack.model.pack_id, order.store_id) for order in orders]
        self.commands += self.retention.commands(self.now)
        self.copies.check_integrity()
        assert len(self.under_way) == len(set(self.under_way)) <= self.config.max_replications
        into = Counter(store_id for _, store_id in self.under_way)
        assert max(into.values(), default=0) <= self.config.max_replications_per_store
        return list(orders)

    def decide(self, seconds: float = 0.5) -> list[CopyOrder]:
        """All orders of the next turns."""
        return [order for _ in range(round(seconds / TURN_S)) for order in self.step()]

    def end(self, key: CopyKey, error: str = "") -> None:
        """The copy arrives, or fails."""
        self.under_way.remove(key)
        pack_id, store_id = key
        if not error:
            self.hold(store_id, pack_id, self.copies.packs[pack_id].model.pack_bytes)
        self.copies.copy_ended(key, self.now, error)

    @property
    def retained(self) -> dict[str, tuple[str, ...]]:
        """The packs that each store retains, in the order of eviction."""
        return {command.store_id: command.pack_ids for command in self.commands}
