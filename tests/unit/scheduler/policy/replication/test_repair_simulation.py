"""Copies survive losses: hosts in racks, models with Zipf demand, hosts that fail and return at random."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from random import Random

from tests.unit.scheduler.policy.replication.copy_cluster import GB, CopyCluster, a_store
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.replication.copies import CopyKey
from torchrelay.scheduler.policy.types import CopyCause, StoreStatus

STEP_S = 0.1
BYTES_PER_S = 1.5e9  # at which each copy arrives
REQUESTS_PER_STEP = 2
RULES = PolicyConfig(recent_s=60.0)


class Simulation:
    """Hosts whose arenas hold all packs that come, in racks of equal size."""

    def __init__(self, seed: int, num_hosts: int, num_racks: int, num_models: int, config: PolicyConfig) -> None:
        self.random, self.cluster = Random(seed), CopyCluster(config)
        self.sizes = {f"p{number}": int(GB * 2 ** self.random.uniform(-1, 3)) for number in range(num_models)}
        self.weights = [1 / (rank + 1) for rank in range(num_models)]
        self.num_rebuilds = 0
        self._arrives_at: dict[CopyKey, float] = {}
        self._returns: list[tuple[float, StoreStatus]] = []
        racks = (f"rack-{number % num_racks}" for number in range(num_hosts))
        self.cluster.report(*(a_store(f"s{n}", domain=rack, arena=1024 * GB) for n, rack in enumerate(racks)))

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.step()

    def step(self) -> None:
        """Requests come, copies arrive, hosts return. A pack without any copy is loaded on the emptiest host."""
        cluster = self.cluster
        for pack_id in self.random.choices([*self.sizes], self.weights, k=REQUESTS_PER_STEP):
            cluster.use(pack_id, ago_s=0.0, num_bytes=self.sizes[pack_id])
            if not cluster.membership.is_held(pack_id):
                emptiest = min(cluster.stores, key=self.num_bytes_on)
                cluster.hold(emptiest, pack_id, self.sizes[pack_id])
        for due in [due for due in self._returns if due[0] <= cluster.now]:
            self._returns.remove(due)
            cluster.report(due[1])
        for order in cluster.step(STEP_S):
            model = order.pack.model
            self.num_rebuilds += order.cause is CopyCause.REBUILD
            self._arrives_at[model.pack_id, order.store_id] = cluster.now + model.pack_bytes / BYTES_PER_S
        for key in list(cluster.under_way):
            if self._arrives_at[key] <= cluster.now:
                cluster.end(key)

    def num_bytes_on(self, store_id: str) -> int:
        return sum(copy.pack_bytes for copy in self.cluster.stores[store_id].copies.values())

    def fail(self, store_id: str, back_s: float, *, keeps_arena: bool = False) -> None:
        store = self.cluster.lose(store_id)
        copies = store.copies if keeps_arena else {}
        back = replace(store, incarnation=f"{store_id} at {self.cluster.now}", copies=copies)
        self._returns.append((self.cluster.now + back_s, back))

    def in_demand(self) -> dict[str, list[StoreStatus]]:
        """The hosts with a whole copy, by pack in demand."""
        cluster = self.cluster
        packs = (pack_id for pack_id, pack in cluster.copies.packs.items() if pack.is_in_demand)
        return {pack_id: cluster.membership.holders(pack_id) for pack_id in packs}

    def protected(self) -> list[str]:
        return [pack_id for pack_id, stores in self.in_demand().items() if len({s.domain for s in stores}) > 1]

    def without_copy(self, pack_ids: Iterable[str]) -> list[str]:
        stores = self.in_demand()
        return [pack_id for pack_id in pack_ids if pack_id in stores and not stores[pack_id]]

    def pass_until_repaired(self, pack_ids: list[str], within_s: float) -> None:
        begin = self.cluster.now
        while any(pack_id in self.in_demand() for pack_id in set(pack_ids) - set(self.protected())):
            assert self.cluster.now - begin < within_s
            self.step()


def test_single_losses_leave_every_pack_a_copy() -> None:
    """Hosts and stores fail one after the other, each once the last loss is repaired; then two at once, then a rack."""
    simulation = Simulation(7, num_hosts=60, num_racks=10, num_models=600, config=RULES)
    cluster = simulation.cluster
    simulation.pass_time(40.0)
    for number in range(6):
        restarts, num_rebuilds, protected = number % 3 == 2, simulation.num_rebuilds, simulation.protected()
        store = simulation.random.choice([store for store in cluster.stores.values() if store.copies])
        simulation.fail(store.store_id, 1.0 if restarts else 20.0, keeps_arena=restarts)
        assert len(protected) > 100 and not simulation.without_copy(protected)
        simulation.pass_until_repaired(protected, 30.0)
        simulation.pass_time(2.0)
        assert (simulation.num_rebuilds == num_rebuilds) is restarts, "a store that comes back at once costs nothing"
        retained = [cluster.retained[store_id] for store_id in cluster.stores if store_id in cluster.retained]
        assert max(Counter(chain.from_iterable(retained)).values()) == RULES.recent_copies
        num_bytes = [sum(simulation.sizes[pack_id] for pack_id in packs) for packs in retained]
        assert max(num_bytes) < 1.5 * sum(num_bytes) / len(num_bytes)
    protected = simulation.protected()
    for store in cluster.membership.holders(simulation.random.choice(protected)):
        simulation.fail(store.store_id, 30.0)
    assert simulation.without_copy(protected)
    simulation.pass_until_repaired(protected, 90.0)
    protected, rack = simulation.protected(), next(iter(cluster.stores.values())).domain
    for store in [store for store in cluster.stores.values() if store.domain == rack]:
        simulation.fail(store.store_id, 30.0)
    assert not simulation.without_copy(protected), "many hosts at once, but of one failure domain"


def test_single_copies_do_not_survive_losses() -> None:
    simulation = Simulation(7, 60, 10, 300, replace(RULES, recent_copies=1))
    simulation.pass_time(20.0)
    had_copies = [*simulation.in_demand()]
    for store_id in simulation.random.sample([*simulation.cluster.stores], 6):
        simulation.fail(store_id, 30.0)
    assert simulation.without_copy(had_copies)
