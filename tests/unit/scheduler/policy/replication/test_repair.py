"""Which copies are kept, made and retained: every rule, on small clusters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.replication.pack_worth import UNKNOWN, PackWorth
from torchrelay.scheduler.policy.replication.repair import PackDemand, ReplicationInput, ReplicationPlan, repair
from torchrelay.scheduler.policy.types import CopyCause, PackCopy, StoreStatus

GB = 1 << 30
NOW = 10_000.0
RULES = PolicyConfig(recent_s=600.0)
CHUNKS = 8


def a_copy(pack_id: str, num_bytes: int = GB, pins: int = 0, verified: int = CHUNKS, error: str = "") -> PackCopy:
    return PackCopy(pack_id, num_bytes, CHUNKS, verified, pins, error)


def a_store(name: str, *copies: PackCopy, domain: str = "", arena: int = 10 * GB) -> StoreStatus:
    held = {copy.pack_id: copy for copy in copies}
    return StoreStatus(name, f"{name} run", f"host of {name}", "", "", NOW, arena, held, domain)


def used(
    pack_id: str,
    ago_s: float = 1.0,
    num_bytes: int = GB,
    settled: bool = False,
    lost: bool = False,
    worth: PackWorth = UNKNOWN,
) -> PackDemand:
    return PackDemand(pack_id, num_bytes, NOW - ago_s, settled, lost, worth)


def decide(
    stores: Iterable[StoreStatus], *packs: PackDemand, config: PolicyConfig = RULES, **known: object
) -> ReplicationPlan:
    by_id = {store.store_id: store for store in stores}
    steps = repair(ReplicationInput(NOW, by_id, packs, **known), config)  # type: ignore[arg-type]
    while True:
        try:
            next(steps)
        except StopIteration as end:
            plan: ReplicationPlan = end.value
            return plan


def orders(decided: ReplicationPlan) -> list[tuple[str, str, CopyCause]]:
    return [(order.pack_id, order.store_id, order.cause) for order in decided.orders]


def three(*copies_of_first: PackCopy) -> list[StoreStatus]:
    """Two stores in rack r1, one in r2."""
    return [a_store("a", *copies_of_first, domain="r1"), a_store("b", domain="r1"), a_store("c", domain="r2")]


def test_single_host_or_domain_orders_nothing_impossible() -> None:
    alone = decide([a_store("a", a_copy("p"))], used("p"))
    assert not alone.orders and alone.settled == {"p"} and alone.retained_packs == {"a": ("p",)}
    rack = [a_store("a", a_copy("p"), domain="r1"), a_store("b", domain="r1")]
    assert orders(decide(rack, used("p"))) == [("p", "b", CopyCause.REPLICATE)]
    rack[1] = a_store("b", a_copy("p"), domain="r1")
    assert not decide(rack, used("p")).orders
    assert not decide([], used("p")).orders


def test_lost_copy_is_rebuilt_urgently_first() -> None:
    stores = three(a_copy("new"), a_copy("old"))
    decided = decide(stores, used("new", 1.0), used("old", 100.0, settled=True))
    assert orders(decided)[0] == ("old", "c", CopyCause.REBUILD) and decided.orders[0].urgent
    assert orders(decided)[1:] == [("new", "b", CopyCause.REPLICATE)]  # c receives the other one
    few = replace(RULES, max_replications_per_store=1, max_replications=1)
    packs = [used("new", 1.0), used("old", 100.0, settled=True), used("older", 200.0, settled=True)]
    stores[0] = a_store("a", a_copy("new"), a_copy("old"), a_copy("older"), domain="r1")
    assert orders(decide(stores, *packs, config=few)) == [("old", "c", CopyCause.REBUILD)]
    assert not decide(stores, *packs, config=few, under_way=(("old", "c"),)).orders


def test_idle_copies_leave_half_of_limits_free() -> None:
    packs = [used(f"p{number}", number) for number in range(20)]
    stores = [a_store("full", *(a_copy(pack.pack_id) for pack in packs), arena=40 * GB)]
    stores += [a_store(f"s{number}", arena=40 * GB) for number in range(20)]
    assert len(decide(stores, *packs, config=replace(RULES, max_replications=8)).orders) == 4


def test_pack_without_demand_keeps_one_copy_in_free_space() -> None:
    old = used("old", ago_s=9_000, lost=True)
    full = [a_store("a", a_copy("x", 8 * GB), arena=10 * GB)]
    assert not decide(full, old).orders  # within the budget of 8 GB there is no space
    stores = [a_store("a", a_copy("old")), a_store("b", a_copy("old"))]
    decided = decide(stores, replace(old, lost=False))
    assert not decided.orders and decided.retained_packs == {"a": (), "b": ()}


def test_extra_copies_may_go_and_pinned_stay() -> None:
    stores = [
        a_store("a", a_copy("p"), domain="r1"),
        a_store("b", a_copy("p", pins=1), domain="r1"),
        a_store("c", a_copy("p"), domain="r2"),
        a_store("d", a_copy("p"), a_copy("x"), domain="r2"),
    ]
    decided = decide(stores, used("p"))
    assert not decided.orders
    assert {store for store, packs in decided.retained_packs.items() if packs} == {"b", "c"}


def test_retained_packs_list_spare_copies_before_last() -> None:
    stores = [a_store("a", a_copy("one"), a_copy("two"), a_copy("three")), a_store("b", a_copy("two"), a_copy("three"))]
    nowhere_else = frozenset({("one", "b")})
    decided = decide(stores, used("one", 5), used("two", 50), used("three", 500), avoid=nowhere_else)
    # On a the spare one is "three", on b it is "two"; of "one" there is no other.
    assert decided.retained_packs == {"a": ("three", "two", "one"), "b": ("two", "three")}
    stores[0] = a_store("a", a_copy("one"))
    gone = frozenset({("one", "b"), ("two", "a"), ("three", "a")})
    assert decide(stores, used("one", 500), used("two", 50), used("three", 5), avoid=gone).retained_packs == {
        "a": ("one",),
        "b": ("two", "three"),
    }


def test_least_worth_goes_first_regardless_of_use() -> None:
    stores = [a_store("a", *map(a_copy, ("late", "dear", "cheap")))]
    packs = [
        used("late", 1, worth=PackWorth(in_ram=2.0)),
        used("cheap", 20, worth=PackWorth(in_ram=1.0)),
        used("dear", 500, worth=PackWorth(in_ram=3.0)),
    ]
    assert decide(stores, *packs).retained_packs == {"a": ("cheap", "late", "dear")}


def test_expected_pack_is_kept_like_recent_pack() -> None:
    stores = three(a_copy("p"))
    assert not decide(stores, used("p", 3000, worth=PackWorth(return_s=601.0))).orders
    decided = decide(stores, used("p", 3000, worth=PackWorth(return_s=599.0)))
    assert orders(decided) == [("p", "c", CopyCause.REPLICATE)]
    assert decided.retained_packs["a"] == ("p",) and decided.in_demand == {"p"} and decided.num_short == 1


def test_rebuild_prefers_host_with_disk_copy() -> None:
    stores = three()
    assert orders(decide(stores, used("p", lost=True))) == [("p", "a", CopyCause.REBUILD)]
    stores[1] = replace(stores[1], disk_pack_ids=frozenset({"p"}))
    assert orders(decide(stores, used("p", lost=True))) == [("p", "b", CopyCause.REBUILD)]


def test_last_copies_are_spread_and_incoming_are_retained() -> None:
    stores = [a_store("a", a_copy("p"), a_copy("q")), a_store("b", a_copy("p"), a_copy("q"))]
    retained_packs = decide(stores, used("p", 1), used("q", 2)).retained_packs
    assert retained_packs["a"][0] != retained_packs["b"][0] and set(retained_packs["a"]) == set(
        retained_packs["b"]
    ) == {"p", "q"}
    assert decide([a_store("a", a_copy("p")), a_store("b")], used("p")).retained_packs == {"a": ("p",), "b": ("p",)}


def test_first_ordered_incoming_copy_is_retained() -> None:
    stores = [a_store("a", a_copy("p")), a_store("b"), a_store("c")]
    for first, second in (("b", "c"), ("c", "b")):
        retained_packs = decide(stores, used("p"), under_way=(("p", first), ("p", second))).retained_packs
        assert retained_packs == {"a": ("p",), first: ("p",), second: ()}


def test_copies_in_one_domain_are_spread() -> None:
    stores = [a_store("a", a_copy("p"), domain="r1"), a_store("b", a_copy("p"), domain="r1")]
    assert not decide(stores, used("p", settled=True)).orders
    stores.append(a_store("c", domain="r2"))
    assert orders(decide(stores, used("p", settled=True))) == [("p", "c", CopyCause.SPREAD)]
    stores[2] = a_store("c", a_copy("p"), domain="r2")
    decided = decide(stores, used("p", settled=True))
    assert not decided.orders and sum(bool(packs) for packs in decided.retained_packs.values()) == 2


def test_new_copy_goes_to_least_full_arena() -> None:
    stores = [
        a_store("a", a_copy("p")),
        a_store("b", a_copy("q", 3 * GB)),
        a_store("c", a_copy("r", 2 * GB)),
        a_store("d", a_copy("s", 2 * GB), arena=40 * GB),
    ]
    sizes = [used("p"), used("q", num_bytes=3 * GB), used("r", num_bytes=2 * GB), used("s", num_bytes=2 * GB)]
    placed = dict.fromkeys("pqrs", "")
    for order in decide(stores, *sizes).orders:
        placed[order.pack_id] = order.store_id
    assert placed["p"] == "d"  # the largest arena
    assert "" not in placed.values() and len(set(placed.values())) == 4


def test_copy_displaces_no_retained_or_pinned_pack() -> None:
    recent = used("p", settled=True)
    surplus = a_store("b", a_copy("stale", 10 * GB))
    assert orders(decide([a_store("a", a_copy("p")), surplus], recent)) == [("p", "b", CopyCause.REBUILD)]
    pinned = a_store("b", a_copy("busy", 9 * GB + 1, pins=1))
    assert not decide([a_store("a", a_copy("p")), pinned], recent).orders
    other = used("q", num_bytes=9 * GB + 1)
    retained = a_store("b", a_copy("q", 9 * GB + 1))
    assert not decide([a_store("a", a_copy("p")), retained], recent, other).orders


def test_lost_pack_may_displace_second_copies() -> None:
    arena = 2 * GB
    stores = [a_store("a", a_copy("q", 2 * GB), arena=arena), a_store("b", a_copy("q", 2 * GB), arena=arena)]
    decided = decide(stores, used("q", 300.0, 2 * GB, settled=True), used("p", lost=True))
    (order,) = decided.orders
    assert order.cause is CopyCause.REBUILD and order.may_evict_retained
    spared = {"a": "b", "b": "a"}[order.store_id]
    assert decided.retained_packs[spared] == ("q",)
    stores = [a_store("a", a_copy("q", 2 * GB), arena=arena), a_store("b", a_copy("r", 2 * GB), arena=arena)]
    last = [used("q", 300.0, 2 * GB), used("r", 300.0, 2 * GB), used("p", lost=True)]
    assert not decide(stores, *last).orders  # a last copy frees space for nobody
