"""The level that everyone can have, and what a pool of senders gives."""

from __future__ import annotations

import pytest

from torchrelay.scheduler.planning.nodes import Node
from torchrelay.scheduler.planning.rate_allocation import ChainMember, fair_rate
from torchrelay.scheduler.planning.sender_pool import SenderPool, SourceAllocation


def test_with_enough_of_everything_the_level_is_the_fastest_link() -> None:
    assert fair_rate(100.0, [ChainMember(90, 100), ChainMember(50, 100)]) == 90


def test_nobody_gets_more_than_the_sources_send() -> None:
    assert fair_rate(40.0, [ChainMember(90, 100), ChainMember(80, 100)]) == pytest.approx(40, rel=1e-5)


def test_uplinks_are_shared_by_all_who_could_take_more() -> None:
    # 100 from the source and 20 from the first: the second's own uplink comes too late for anyone.
    assert fair_rate(100.0, [ChainMember(90, 20), ChainMember(90, 10)]) == pytest.approx(60, rel=1e-5)


def test_who_takes_less_leaves_more_to_the_others() -> None:
    assert fair_rate(100.0, [ChainMember(90, 0), ChainMember(30, 0)]) == pytest.approx(70, rel=1e-5)


def test_who_is_being_fed_already_only_gives() -> None:
    assert fair_rate(10.0, [ChainMember(90, 40, 0), ChainMember(80, 0)]) == pytest.approx(50, rel=1e-5)
    assert fair_rate(0.0, [ChainMember(90, 40), ChainMember(30, 100, 0)]) == pytest.approx(30, rel=1e-5)


def test_the_tightest_fit_leaves_large_senders_for_large_needs() -> None:
    pool = SenderPool()
    for store, out in (("a", 100.0), ("b", 60.0), ("c", 50.0)):
        pool.add(store, Node(out))
    assert pool.allocate(55.0, "", 4) == [SourceAllocation("b", 55.0)]
    assert pool.allocate(100.0, "", 4) == [SourceAllocation("a", 100.0)]


def test_a_free_direction_comes_before_a_tighter_fit() -> None:
    pool = SenderPool()
    pool.add("a", Node(100.0))
    pool.add("b", Node(300.0))
    pool.allocate(40.0, "", 4)  # from a, which has 60 left
    assert pool.allocate(60.0, "", 4) == [SourceAllocation("b", 60.0)]


def test_what_no_one_has_alone_is_pieced_together_largest_first() -> None:
    pool = SenderPool()
    for store, out in (("a", 30.0), ("b", 60.0), ("c", 50.0)):
        pool.add(store, Node(out))
    assert pool.allocate(100.0, "", 4) == [SourceAllocation("b", 60.0), SourceAllocation("c", 40.0)]
    assert pool.allocate(100.0, "", 1) == [SourceAllocation("a", 30.0)]


def test_when_all_is_taken_a_direction_is_shared() -> None:
    pool = SenderPool()
    pool.add("a", Node(100.0))
    pool.allocate(100.0, "", 4)
    assert pool.allocate(80.0, "", 4) == [SourceAllocation("a", 50.0)]
    assert SenderPool().allocate(80.0, "", 4) == []
