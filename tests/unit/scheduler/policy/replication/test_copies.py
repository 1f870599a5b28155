"""Which copies are kept and made: every rule on small clusters, and what holds at rest after any history."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scheduler.policy.replication.copy_cluster import GB, CopyCluster, a_copy, a_store
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.replication.copies import CopyOrder
from torchrelay.scheduler.policy.replication.worth import PackWorth
from torchrelay.scheduler.policy.types import CopyCause, PackCopy

REBUILD, REPLICATE = CopyCause.REBUILD, CopyCause.REPLICATE


def briefly(orders: list[CopyOrder]) -> list[tuple[str, str, CopyCause]]:
    return [(order.pack.model.pack_id, order.store_id, order.cause) for order in orders]


def two_racks(*copies_of_first: PackCopy, **config: object) -> CopyCluster:
    """Two stores in rack r1, one in r2."""
    cluster = CopyCluster(PolicyConfig(**config))  # type: ignore[arg-type]
    return cluster.report(
        a_store("a", *copies_of_first, domain="r1"), a_store("b", domain="r1"), a_store("c", domain="r2")
    )


def test_single_host_or_domain_gets_what_is_possible() -> None:
    alone = CopyCluster().report(a_store("a", a_copy("p"))).use("p")
    assert not alone.decide() and alone.copies.num_short == 0 and alone.retained == {"a": ("p",)}
    rack = CopyCluster().report(a_store("a", a_copy("p"), domain="r1"), a_store("b", domain="r1")).use("p")
    assert briefly(rack.decide()) == [("p", "b", REPLICATE)] and rack.copies.num_short == 1
    rack.end(("p", "b"))
    assert not rack.decide() and rack.copies.num_short == 0
    assert not CopyCluster().use("p").decide()


def test_second_copy_in_same_domain_counts_as_missing() -> None:
    cluster = CopyCluster().use("p")
    cluster.report(*(a_store(name, a_copy("p"), domain="r1") for name in "ab"))
    assert not cluster.decide() and set(cluster.retained) == {"a", "b"}
    cluster.report(a_store("c", domain="r2"))
    (order,) = cluster.decide(5.0)
    assert briefly([order]) == [("p", "c", REPLICATE)] and order.reason == "in demand, and a, b may fail together"
    assert all(packs == ("p",) for packs in cluster.retained.values()), "both stay until the third is whole"
    cluster.end(("p", "c"))
    assert not cluster.decide(5.0) and sorted(cluster.retained.values()) == [(), ("p",), ("p",)]


def test_copy_of_other_domain_is_awaited_while_its_stores_are_busy() -> None:
    cluster = two_racks(a_copy("p"), a_copy("q")).use("p", "q")
    assert [order.store_id for order in cluster.decide(9.0)] == ["c"]
    cluster.end(cluster.under_way[0])
    assert [order.store_id for order in cluster.decide()] == ["c"]


def test_full_domain_is_replaced_by_another_host() -> None:
    cluster = two_racks(a_copy("p")).use("p")
    cluster.report(a_store("c", domain="r2", arena=GB // 2))
    assert briefly(cluster.decide()) == [("p", "b", REPLICATE)]
    cluster.end(("p", "b"))
    assert not cluster.decide(9.0) and cluster.copies.num_short == 1
    cluster.report(a_store("c", domain="r2"))
    assert briefly(cluster.decide(5.0)) == [("p", "c", REPLICATE)]


def test_lost_copy_is_rebuilt_urgently_first() -> None:
    cluster = two_racks(a_copy("old"), a_copy("new"), max_replications=1).use("old")
    cluster.hold("c", "old")
    cluster.lose("c")
    cluster.report(a_store("d", domain="r2"), a_store("e", domain="r2"))
    assert not cluster.decide(1.5), "it may come back"
    cluster.use("new")
    cluster.now += 0.6
    (order,) = cluster.decide()
    assert briefly([order]) == [("old", "d", REBUILD)]
    assert order.reason == "a copy was lost; it is left on a"
    cluster.end(("old", "d"))
    assert briefly(cluster.decide()) == [("new", "e", REPLICATE)]


def test_most_valuable_lost_pack_is_first_of_many() -> None:
    packs = [f"p{number}" for number in range(60)]
    cluster = CopyCluster().use(*packs, ago_s=100.0)
    cluster.report(a_store("a", *map(a_copy, packs), arena=200 * GB), a_store("b", *map(a_copy, packs)))
    cluster.report(*(a_store(f"c{number}", arena=200 * GB) for number in range(20)))
    cluster.worths["p7"], cluster.worths["p50"] = PackWorth(9.0), PackWorth(8.0)
    assert not cluster.decide(5.0)
    cluster.lose("b")
    orders = briefly(cluster.decide(3.0))
    assert [pack_id for pack_id, _, _ in orders[:2]] == ["p7", "p50"] and len(orders) == 32
    assert {cause for _, _, cause in orders} == {REBUILD}


def test_idle_copies_leave_half_of_limits_free() -> None:
    packs = [f"p{number}" for number in range(20)]
    cluster = CopyCluster(PolicyConfig(max_replications=8)).use(*packs)
    cluster.report(a_store("full", *map(a_copy, packs), arena=40 * GB), *(a_store(f"s{n}") for n in range(20)))
    assert [pack_id for pack_id, _, _ in briefly(cluster.decide())] == packs[-1:-5:-1], "the most valuable first"


def test_returned_store_costs_nothing_and_restart_without_arena_is_loss() -> None:
    cluster = two_racks(a_copy("p")).use("p")
    cluster.hold("c", "p")
    store = cluster.lose("c")
    assert not cluster.decide(1.5)
    cluster.report(replace(store, incarnation="c 2"))
    assert not cluster.decide(5.0)
    cluster.report(a_store("c", domain="r2"))
    assert briefly(cluster.decide()) == [("p", "c", REBUILD)]


def test_lost_pack_without_demand_is_not_made_again() -> None:
    cluster = two_racks().use("p", ago_s=599.0)
    cluster.report(a_store("d", a_copy("p")))
    cluster.lose("d")
    assert not cluster.decide(9.0)
    cluster.use("p", ago_s=0.0)
    assert not cluster.decide(1.0), "its load brings it"
    cluster.hold("a", "p")
    assert briefly(cluster.decide()) == [("p", "c", REPLICATE)]


def test_pack_evicted_everywhere_waits_for_its_load() -> None:
    cluster = two_racks(a_copy("p")).use("p")
    cluster.drop("a", "p")
    assert not cluster.decide(9.0)


def test_expected_pack_is_kept_like_recent_pack() -> None:
    cluster = two_racks(a_copy("p")).use("p", ago_s=3000.0)
    cluster.worths["p"] = PackWorth(return_s=601.0)
    assert not cluster.decide(5.0) and cluster.copies.num_short == 0
    cluster.worths["p"] = PackWorth(return_s=599.0)
    assert briefly(cluster.decide(5.0)) == [("p", "c", REPLICATE)] and cluster.copies.num_short == 1


def test_rebuild_prefers_host_with_disk_copy() -> None:
    cluster = two_racks().use("p")
    cluster.report(a_store("d", a_copy("p")))
    cluster.report(replace(cluster.stores["b"], disk_pack_ids=frozenset({"p"})))
    cluster.lose("d")
    order, second = cluster.decide(3.0)
    assert briefly([order, second]) == [("p", "b", REBUILD), ("p", "c", REBUILD)]
    assert order.reason == "its last copy was lost with a host"


def test_new_copy_goes_to_least_full_arena() -> None:
    cluster = CopyCluster().use("q", num_bytes=3 * GB).use("r", num_bytes=2 * GB).use("s", num_bytes=2 * GB).use("p")
    cluster.report(a_store("a", a_copy("p")), a_store("b", a_copy("q", 3 * GB)), a_store("c", a_copy("r", 2 * GB)))
    cluster.report(a_store("d", a_copy("s", 2 * GB), arena=40 * GB))
    placed = {pack_id: store_id for pack_id, store_id, _ in briefly(cluster.decide())}
    assert placed["p"] == "d" and len(set(placed.values())) == 4


def test_copy_displaces_no_kept_or_pinned_pack() -> None:
    def order_of_p(held: PackCopy) -> list[tuple[str, str, CopyCause]]:
        cluster = CopyCluster().use("p", ago_s=0.0).use("used", num_bytes=9 * GB + 1)
        cluster.report(a_store("a", a_copy("p")), a_store("b", held))
        return [order for order in briefly(cluster.decide(5.0)) if order[0] == "p"]

    assert order_of_p(a_copy("unused", 10 * GB)) == [("p", "b", REPLICATE)]
    assert not order_of_p(a_copy("unused", 9 * GB + 1, num_pins=1))
    assert not order_of_p(a_copy("used", 9 * GB + 1))


@pytest.mark.parametrize("has_second_copy", [True, False])
def test_lost_pack_may_displace_second_copies(has_second_copy: bool) -> None:
    cluster = CopyCluster().use("q", "r", ago_s=300.0, num_bytes=2 * GB).use("p")
    others = ("q", "q") if has_second_copy else ("q", "r")
    cluster.report(
        *(a_store(name, a_copy(pack_id, 2 * GB), arena=2 * GB) for name, pack_id in zip("ab", others, strict=True))
    )
    cluster.report(a_store("c", a_copy("p")))
    cluster.lose("c")
    orders = cluster.decide(3.0)
    assert len(orders) == has_second_copy, "a last copy frees space for nobody"
    for order in orders:
        assert order.may_evict_retained and order.cause is REBUILD
        assert cluster.copies.packs["q"].kept[0] != order.store_id


def test_extra_copies_may_go_and_pinned_stay() -> None:
    cluster = CopyCluster().use("p")
    cluster.report(a_store("a", a_copy("p"), domain="r1"), a_store("b", a_copy("p", num_pins=1), domain="r1"))
    cluster.report(a_store("c", a_copy("p"), domain="r2"), a_store("d", a_copy("p"), a_copy("x"), domain="r2"))
    assert not cluster.decide()
    assert {store_id for store_id, packs in cluster.retained.items() if packs} == {"b", "c"}


def test_failed_copy_is_tried_elsewhere_and_again_after_growing_pauses() -> None:
    cluster = two_racks(a_copy("p")).use("p")
    cluster.decide()
    cluster.end(("p", "c"), "the arena is full")
    assert briefly(cluster.decide()) == [("p", "b", REPLICATE)]
    cluster.end(("p", "b"))
    for pause_s in (1.0, 2.0, 4.0):
        num_waited_s = next(seconds for seconds in range(70) if cluster.decide(1.0))
        assert pause_s - 2.0 <= num_waited_s <= pause_s + 4.0
        cluster.end(("p", "c"), "the arena is full")
    assert not cluster.decide(7.0)


def test_longest_unused_pack_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrelay.scheduler.policy.replication.copies.MAX_VERSIONS", 2)
    cluster = CopyCluster().report(a_store("a", a_copy("p"), a_copy("q"), a_copy("r"))).use("p", "q", ago_s=9.0)
    cluster.decide()
    cluster.use("p", ago_s=5.0).use("r")
    cluster.decide()
    assert cluster.copies.packs.keys() == {"p", "r"} and cluster.retained["a"] == ("p", "r")


class RandomHistory:
    """Stores that obey, of which each may be lost, may return, and may fail to make copies."""

    def __init__(self, random: Random) -> None:
        self.random, self.lost, self.may_evict = random, list[str](), dict[tuple[str, str], bool]()
        self.cluster = CopyCluster(PolicyConfig(max_replications=4))
        self.racks = {f"s{number}": f"r{random.randint(1, 3)}" for number in range(random.randint(1, 6))}
        self.arena = random.randint(3, 8) * GB
        self.sizes = {f"p{number}": random.randint(1, 3) * GB for number in range(8)}
        self.cluster.report(*(a_store(name, domain=rack, arena=self.arena) for name, rack in self.racks.items()))

    def go_on(self) -> None:
        random, cluster = self.random, self.cluster
        pack_id, stores = random.choice([*self.sizes]), [*cluster.stores]
        match random.randint(0, 7):
            case 0 | 1 | 2:
                cluster.use(pack_id, ago_s=0.0, num_bytes=self.sizes[pack_id])
                if not cluster.membership.holders(pack_id) and stores:
                    self.receive(random.choice(stores), pack_id, may_evict_retained=True)
            case 3 if stores:
                self.lost.append(cluster.lose(random.choice(stores)).store_id)
            case 4 if self.lost:
                name = self.lost.pop()
                again = f"{name} at {cluster.now}"
                cluster.report(replace(a_store(name, domain=self.racks[name], arena=self.arena), incarnation=again))
            case 5 if cluster.under_way:
                key = random.choice(cluster.under_way)
                cluster.end(key, "it failed")
            case _:
                self.end_copies()
        self.step(random.choice([0.02, 0.5, 3.0]))

    def step(self, seconds: float) -> None:
        """A turn of the policy. No order may cost a last copy if its store evicts what it was told to."""
        for order in self.cluster.step(seconds):
            model = order.pack.model
            self.may_evict[model.pack_id, order.store_id] = order.may_evict_retained
            for evicted in self.evicted_for(order.store_id, model.pack_id, may_evict_retained=order.may_evict_retained):
                has_another = len(self.cluster.membership.whole_holders(evicted)) > 1
                assert has_another or not self.cluster.copies.packs[evicted].kept, "a last copy is evicted last"

    def evicted_for(self, store_id: str, pack_id: str, *, may_evict_retained: bool) -> list[str]:
        """The packs that the store evicts to make space for a copy; retained packs go last, in their order."""
        copies, retained = self.cluster.stores[store_id].copies, self.cluster.retained.get(store_id, ())
        in_order = [*sorted(copies.keys() - set(retained)), *(each for each in retained if each in copies)]
        num_missing = self.sizes[pack_id] + sum(copy.pack_bytes for copy in copies.values()) - self.arena
        evicted: list[str] = []
        for each in in_order if pack_id not in copies else ():
            if num_missing > 0 and (may_evict_retained or each not in retained):
                num_missing -= copies[each].pack_bytes
                evicted.append(each)
        return evicted

    def receive(self, store_id: str, pack_id: str, *, may_evict_retained: bool) -> None:
        cluster = self.cluster
        for evicted in self.evicted_for(store_id, pack_id, may_evict_retained=may_evict_retained):
            cluster.drop(store_id, evicted)
        others = (copy.pack_bytes for key, copy in cluster.stores[store_id].copies.items() if key != pack_id)
        has_space = sum(others) + self.sizes[pack_id] <= self.arena
        if (pack_id, store_id) in cluster.under_way:
            cluster.end((pack_id, store_id), "" if has_space else "the arena is full")
        elif has_space:
            cluster.hold(store_id, pack_id, self.sizes[pack_id])

    def end_copies(self) -> None:
        """All copies under way arrive, or fail for want of space."""
        for pack_id, store_id in list(self.cluster.under_way):
            self.receive(store_id, pack_id, may_evict_retained=self.may_evict.get((pack_id, store_id), False))

    def rest(self) -> None:
        for _ in range(40):
            self.step(2.0)
            self.end_copies()

    def check(self) -> None:
        """Each pack in demand is in two domains, or nowhere, or no store in another domain has space for it."""
        cluster = self.cluster
        num_domains = len({store.domain for store in cluster.stores.values()})
        for pack_id, pack in cluster.copies.packs.items():
            holders = cluster.membership.holders(pack_id)
            domains = {store.domain for store in holders}
            if not pack.is_in_demand or not holders or len(domains) >= min(2, num_domains):
                continue
            for store in cluster.stores.values():
                kept = [each for each, other in cluster.copies.packs.items() if store.store_id in other.kept]
                has_space = sum(self.sizes[each] for each in kept) + self.sizes[pack_id] <= self.arena
                assert store.domain in domains or not has_space, (pack_id, store.store_id)


@given(st.integers(0, 1 << 32))
def test_packs_in_demand_are_in_two_domains_at_rest(seed: int) -> None:
    history = RandomHistory(Random(seed))
    for _ in range(history.random.randint(5, 60)):
        history.go_on()
    history.rest()
    history.check()
    assert not history.cluster.under_way
