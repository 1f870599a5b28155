"""Copies survive losses, and are where they should be at rest: hosts in racks that fail and return at random."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scheduler.policy.replication.copy_cluster import GB, CopyCluster, a_store
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.replication.copies import CopyKey
from torchrelay.scheduler.policy.types import CopyCause, StoreStatus

BYTES_PER_S = 1.5e9  # at which each copy arrives
RULES = PolicyConfig(recent_s=60.0)


class Hosts:
    """Stores that obey, and models with Zipf demand. A model without a copy is loaded on the emptiest host."""

    def __init__(
        self, random: Random, racks: Sequence[str], sizes: Sequence[int], arena: int, config: PolicyConfig = RULES
    ) -> None:
        self.random, self.arena, self.cluster = random, arena, CopyCluster(config)
        self.sizes = {f"p{number}": size for number, size in enumerate(sizes)}
        self.weights = [1 / (rank + 1) for rank in range(len(sizes))]
        self.num_rebuilds = 0
        self._orders: dict[CopyKey, tuple[float, bool]] = {}  # when each arrives, and whether it evicts retained packs
        self._returns: list[tuple[float, StoreStatus]] = []
        self.cluster.report(*(a_store(f"s{n}", domain=rack, arena=arena) for n, rack in enumerate(racks)))

    def request(self) -> None:
        (pack_id,), stores = self.random.choices([*self.sizes], self.weights), self.cluster.stores
        self.cluster.use(pack_id, ago_s=0.0, num_bytes=self.sizes[pack_id])
        if stores and not self.cluster.membership.holders(pack_id):
            self._receive(min(stores, key=self._num_bytes_on), pack_id, may_evict_retained=True)

    def fail(self, store_id: str, back_s: float, *, keeps_arena: bool = False) -> None:
        store = self.cluster.lose(store_id)
        copies = store.copies if keeps_arena else {}
        back = replace(store, incarnation=f"{store_id} at {self.cluster.now}", copies=copies)
        self._returns.append((self.cluster.now + back_s, back))

    def step(self, seconds: float) -> None:
        """Hosts return, copies are ordered, and copies arrive. No order costs a last copy."""
        cluster = self.cluster
        for due in [due for due in self._returns if due[0] <= cluster.now]:
            self._returns.remove(due)
            cluster.report(due[1])
        for order in cluster.step(seconds):
            model, evicts = order.pack.model, order.may_evict_retained
            self.num_rebuilds += order.cause is CopyCause.REBUILD
            arrives_at = cluster.now + model.pack_bytes / BYTES_PER_S
            self._orders[model.pack_id, order.store_id] = arrives_at, evicts
            for evicted in self._evicted_for(order.store_id, model.pack_id, may_evict_retained=evicts):
                is_kept = evicted in cluster.copies.packs and cluster.copies.packs[evicted].kept
                assert not is_kept or len(cluster.membership.whole_holders(evicted)) > 1, "last copies are evicted last"
        for pack_id, store_id in list(cluster.under_way):
            arrives_at, evicts = self._orders[pack_id, store_id]
            if arrives_at <= cluster.now:
                self._receive(store_id, pack_id, may_evict_retained=evicts)

    def _receive(self, store_id: str, pack_id: str, *, may_evict_retained: bool) -> None:
        cluster = self.cluster
        for evicted in self._evicted_for(store_id, pack_id, may_evict_retained=may_evict_retained):
            cluster.drop(store_id, evicted)
        has_space = self._num_bytes_on(store_id) + self.sizes[pack_id] <= self.arena
        if (pack_id, store_id) in cluster.under_way:
            cluster.end((pack_id, store_id), "" if has_space else "the arena is full")
        elif has_space:
            cluster.hold(store_id, pack_id, self.sizes[pack_id])

    def _evicted_for(self, store_id: str, pack_id: str, *, may_evict_retained: bool) -> Iterable[str]:
        """The packs that the store evicts to make space for a copy; retained packs go last, in their order."""
        copies, retained = self.cluster.stores[store_id].copies, self.cluster.retained.get(store_id, ())
        num_missing = self._num_bytes_on(store_id) + self.sizes[pack_id] - self.arena
        in_order = [*sorted(copies.keys() - set(retained)), *(each for each in retained if each in copies)]
        for each in in_order:
            if num_missing > 0 and (may_evict_retained or each not in retained):
                num_missing -= copies[each].pack_bytes
                yield each

    def _num_bytes_on(self, store_id: str) -> int:
        return sum(copy.pack_bytes for copy in self.cluster.stores[store_id].copies.values())

    def in_demand(self) -> dict[str, list[StoreStatus]]:
        """The hosts with a copy, by pack in demand."""
        packs, membership = self.cluster.copies.packs, self.cluster.membership
        return {pack_id: membership.holders(pack_id) for pack_id, pack in packs.items() if pack.is_in_demand}

    def protected(self) -> set[str]:
        """The packs in demand that are in two racks."""
        return {pack_id for pack_id, stores in self.in_demand().items() if len({s.domain for s in stores}) > 1}

    def without_copy(self, pack_ids: Collection[str]) -> list[str]:
        return [pack_id for pack_id, stores in self.in_demand().items() if pack_id in pack_ids and not stores]

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.1)):
            self.request()
            self.request()
            self.step(0.1)

    def pass_until_repaired(self, pack_ids: set[str], within_s: float) -> None:
        begin = self.cluster.now
        while (pack_ids & self.in_demand().keys()) - self.protected():
            assert self.cluster.now - begin < within_s
            self.pass_time(0.1)


def test_single_losses_leave_every_pack_a_copy() -> None:
    """Hosts and stores fail one after the other, each once the last loss is repaired; then two at once, then a rack."""
    random = Random(7)
    sizes = [int(GB * 2 ** random.uniform(-1, 3)) for _ in range(600)]
    hosts = Hosts(random, [f"rack-{number % 10}" for number in range(60)], sizes, 1024 * GB)
    cluster = hosts.cluster
    hosts.pass_time(40.0)
    for number in range(6):
        restarts, num_rebuilds, protected = number % 3 == 2, hosts.num_rebuilds, hosts.protected()
        store = hosts.random.choice([store for store in cluster.stores.values() if store.copies])
        hosts.fail(store.store_id, 1.0 if restarts else 20.0, keeps_arena=restarts)
        assert len(protected) > 100 and not hosts.without_copy(protected)
        hosts.pass_until_repaired(protected, 30.0)
        hosts.pass_time(2.0)
        assert (hosts.num_rebuilds == num_rebuilds) is restarts, "a store that comes back at once costs nothing"
        retained = [cluster.retained[store_id] for store_id in cluster.stores if store_id in cluster.retained]
        assert max(Counter(chain.from_iterable(retained)).values()) == RULES.recent_copies
        num_bytes = [sum(hosts.sizes[pack_id] for pack_id in packs) for packs in retained]
        assert max(num_bytes) < 1.5 * sum(num_bytes) / len(num_bytes)
    protected = hosts.protected()
    for store in cluster.membership.holders(min(protected)):
        hosts.fail(store.store_id, 30.0)
    assert hosts.without_copy(protected)
    hosts.pass_until_repaired(protected, 90.0)
    protected = hosts.protected()
    for store in [store for store in cluster.stores.values() if store.domain == "rack-1"]:
        hosts.fail(store.store_id, 30.0)
    assert not hosts.without_copy(protected), "many hosts at once, but of one failure domain"


@given(st.integers(0, 1 << 32))
def test_packs_in_demand_are_in_two_domains_at_rest(seed: int) -> None:
    """Or no copy is left, or no store of another domain has space."""
    random = Random(seed)
    racks = [f"r{random.randint(1, 3)}" for _ in range(random.randint(1, 6))]
    sizes = [random.randint(1, 3) * GB for _ in range(8)]
    hosts = Hosts(random, racks, sizes, random.randint(3, 8) * GB, PolicyConfig(max_replications=4))
    cluster = hosts.cluster
    for _ in range(random.randint(5, 60)):
        match random.randint(0, 4):
            case 0 if cluster.stores:
                hosts.fail(random.choice([*cluster.stores]), random.uniform(0, 30), keeps_arena=random.random() < 0.3)
            case 1 if cluster.under_way:
                cluster.end(random.choice(cluster.under_way), "it failed")
            case _:
                hosts.request()
        hosts.step(random.choice([0.02, 0.5, 3.0]))
    for _ in range(60):
        hosts.step(2.0)
    assert not cluster.under_way
    for pack_id, stores in hosts.in_demand().items():
        domains = {store.domain for store in stores}
        if stores and len(domains) < min(2, len(set(racks))):
            for store in cluster.stores.values():
                kept = [each for each, pack in cluster.copies.packs.items() if store.store_id in pack.kept]
                has_space = sum(hosts.sizes[each] for each in kept) + hosts.sizes[pack_id] <= hosts.arena
                assert store.domain in domains or not has_space, (pack_id, store.store_id)
