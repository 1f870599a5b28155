"""The packs that stores are told to retain, and the order in which they evict them."""

from __future__ import annotations

from collections import defaultdict
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


def test_store_is_told_at_once_of_a_last_copy() -> None:
    cluster = CopyCluster().use("p", "q").report(*(a_store(name, a_copy("p"), a_copy("q")) for name in "ab"))
    cluster.decide(0.1)
    assert {packs[-1] for packs in cluster.retained.values()} == {"p", "q"}, "last copies are spread over the stores"
    spare, last = cluster.retained["a"]
    cluster.worths[spare] = PackWorth(9.0)
    cluster.drop("b", spare)
    cluster.decide(0.1)
    assert cluster.retained["a"] == (last, spare)


def test_leases_are_renewed_in_time_a_few_per_turn() -> None:
    cluster, times = CopyCluster().use("p"), defaultdict[str, list[float]](list)
    cluster.report(*(a_store(f"s{number}", a_copy(f"p{number}"), domain="r") for number in range(200)))
    cluster.use(*(f"p{number}" for number in range(200)))
    for _ in range(1300):
        num_before = len(cluster.commands)
        cluster.step()
        assert len(cluster.commands) - num_before <= 8
        for command in cluster.commands[num_before:]:
            times[command.store_id].append(cluster.now)
    assert len(times) == 200
    assert all(later - time < 12.0 for of_store in times.values() for time, later in pairwise([*of_store, cluster.now]))


def test_refused_or_lost_lease_is_given_again_and_ended_demand_is_told_once() -> None:
    cluster = CopyCluster(PolicyConfig(recent_s=20.0)).report(a_store("a", a_copy("p"))).use("p")
    cluster.decide(1.0)
    cluster.retention.refused("a", cluster.now)
    cluster.decide(2.1)
    cluster.report(replace(cluster.stores["a"], incarnation="a 2"))
    cluster.decide(0.1)
    assert [command.pack_ids for command in cluster.commands] == [("p",), ("p",), ("p",)]
    cluster.decide(25.0)
    assert cluster.retained == {"a": ()}
    num_commands = len(cluster.commands)
    cluster.decide(25.0)
    assert len(cluster.commands) == num_commands, "nothing is retained, and the store knows"


def test_disk_order_has_copies_in_ram_too_and_no_unknown_packs() -> None:
    cluster = CopyCluster().use("p", "q")
    cluster.worths |= {"p": PackWorth(on_disk=2.0), "q": PackWorth(on_disk=1.0)}
    cluster.report(replace(a_store("a", a_copy("p")), disk_pack_ids=frozenset({"q", "of nobody"})), a_store("b"))
    cluster.decide(0.1)
    assert [command.disk_pack_ids for command in cluster.commands if command.store_id == "a"][-1] == ("q", "p")
    cluster.worths |= {"p": PackWorth(on_disk=0.5)}
    cluster.decide(15.0)
    assert [command.disk_pack_ids for command in cluster.commands if command.store_id == "a"][-1] == ("p", "q")
