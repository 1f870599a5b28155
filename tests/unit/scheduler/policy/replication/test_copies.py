"""Which copies are kept and made: every rule on small clusters."""

from __future__ import annotations

from dataclasses import replace

import pytest

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


def test_lost_pack_without_demand_is_not_made_again() -> None:
    cluster = two_racks().use("p", ago_s=599.0)
    cluster.report(a_store("d", a_copy("p")))
    cluster.lose("d")
    assert not cluster.decide(9.0)
    cluster.use("p", ago_s=0.0)
    assert not cluster.decide(1.0), "its load brings it"
    cluster.hold("a", "p")
    cluster.drop("a", "p")
    assert not cluster.decide(9.0), "it was evicted with permission"
    cluster.hold("a", "p")
    assert briefly(cluster.decide()) == [("p", "c", REPLICATE)]


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
