"""The packs that stores are told to retain, and the order in which they evict them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from tests.unit.scheduler.policy.replication.copy_cluster import CopyCluster, a_copy, a_store
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.replication.worth import PackWorth


def test_packs_kept_elsewhere_go_first_then_by_worth() -> None:
    cluster = CopyCluster().use("one", "two", "three", ago_s=0.0)
    cluster.worths |= {"one": PackWorth(3.0), "two": PackWorth(2.0), "three": PackWorth(1.0)}
    cluster.report(a_store("a", *map(a_copy, ("one", "two", "three"))), a_store("b", a_copy("two"), a_copy("three")))
    cluster.decide(0.02)
    # Last copies are on a, but that of "two"; b will have "one", too.
    assert cluster.retained == {"a": ("two", "three", "one"), "b": ("three", "one", "two")}
    cluster.lose("b")
    cluster.decide(12.0)
    assert cluster.retained["a"] == ("three", "two", "one"), "all are last copies"


def test_new_last_copy_is_moved_back_at_once() -> None:
    cluster = CopyCluster(PolicyConfig(recent_copies=2)).use("p", "q", ago_s=0.0)
    cluster.report(*(a_store(name, a_copy("p"), a_copy("q")) for name in "ab"))
    cluster.decide(0.1)
    assert {packs[-1] for packs in cluster.retained.values()} == {"p", "q"}, "last copies are spread over the stores"
    first = cluster.retained["a"]
    cluster.drop("b", first[0])
    cluster.decide(0.1)
    assert cluster.retained["a"][-1] in first and set(cluster.retained["a"]) == set(first)
    assert cluster.copies.packs[first[0]].kept[0] == "a"


def test_incoming_copy_is_retained_and_unused_pack_is_not() -> None:
    cluster = CopyCluster().report(a_store("a", a_copy("p"), a_copy("old")), a_store("b")).use("old", ago_s=700.0)
    cluster.use("p").decide()
    assert cluster.retained == {"a": ("p",), "b": ("p",)} and cluster.under_way == [("p", "b")]


def test_leases_are_renewed_for_all_stores_in_time() -> None:
    cluster = CopyCluster().use("p")
    cluster.report(*(a_store(f"s{number}", a_copy("p"), domain="r") for number in range(60)))
    cluster.decide(1.0)
    renewals: dict[str, list[float]] = {
        store_id: [cluster.now] for store_id, packs in cluster.retained.items() if packs
    }
    for _ in range(2000):
        num_before = len(cluster.commands)
        cluster.step()
        cluster.use("p")
        assert len(cluster.commands) - num_before <= 8
        for command in cluster.commands[num_before:]:
            renewals[command.store_id].append(cluster.now)
    assert len(renewals) == 2
    for times in renewals.values():
        assert len(times) >= 4 and all(5.0 < later - time < 12.0 for time, later in pairwise(times))


def test_refused_lease_is_retried_and_ended_demand_is_told_once() -> None:
    cluster = CopyCluster(PolicyConfig(recent_s=20.0)).report(a_store("a", a_copy("p"))).use("p")
    cluster.decide(1.0)
    cluster.retention.refused("a", cluster.now)
    cluster.decide(2.1)
    assert [command.pack_ids for command in cluster.commands] == [("p",), ("p",)]
    cluster.decide(25.0)
    assert cluster.retained == {"a": ()}
    num_commands = len(cluster.commands)
    cluster.decide(25.0)
    assert len(cluster.commands) == num_commands, "nothing is retained, and the store knows"


def test_restarted_store_gets_its_lease_again() -> None:
    cluster = CopyCluster().report(a_store("a", a_copy("p"))).use("p")
    cluster.decide(1.0)
    cluster.report(replace(cluster.stores["a"], incarnation="a 2"))
    cluster.decide(0.1)
    assert [command.pack_ids for command in cluster.commands] == [("p",), ("p",)]


def test_disk_order_has_copies_in_ram_too_and_no_unknown_packs() -> None:
    cluster = CopyCluster().use("p", "q")
    cluster.worths |= {"p": PackWorth(on_disk=2.0), "q": PackWorth(on_disk=1.0)}
    cluster.report(replace(a_store("a", a_copy("p")), disk_pack_ids=frozenset({"q", "of nobody"})), a_store("b"))
    cluster.decide(0.1)
    assert [command.disk_pack_ids for command in cluster.commands if command.store_id == "a"][-1] == ("q", "p")
    cluster.worths |= {"p": PackWorth(on_disk=0.5)}
    cluster.decide(15.0)
    assert [command.disk_pack_ids for command in cluster.commands if command.store_id == "a"][-1] == ("p", "q")
