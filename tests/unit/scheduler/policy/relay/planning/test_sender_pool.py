"""Allocations of a pool of senders."""

from __future__ import annotations

from torchrelay.scheduler.policy.relay.planning.nodes import Node
from torchrelay.scheduler.policy.relay.planning.sender_pool import SenderPool, SourceAllocation


def test_tightest_fit_spares_large_senders() -> None:
    pool = SenderPool()
    for store, out in (("a", 100.0), ("b", 60.0), ("c", 50.0)):
        pool.add(store, Node(out))
    assert pool.allocate(55.0, "", 4) == [SourceAllocation("b", 55.0)]
    assert pool.allocate(100.0, "", 4) == [SourceAllocation("a", 100.0)]


def test_idle_direction_precedes_tighter_fit() -> None:
    pool = SenderPool()
    pool.add("a", Node(100.0))
    pool.add("b", Node(300.0))
    pool.allocate(40.0, "", 4)  # from a, which has 60 left
    assert pool.allocate(60.0, "", 4) == [SourceAllocation("b", 60.0)]


def test_need_above_any_sender_is_striped_largest_first() -> None:
    pool = SenderPool()
    for store, out in (("a", 30.0), ("b", 60.0), ("c", 50.0)):
        pool.add(store, Node(out))
    assert pool.allocate(100.0, "", 4) == [SourceAllocation("b", 60.0), SourceAllocation("c", 40.0)]
    assert pool.allocate(100.0, "", 1) == [SourceAllocation("a", 30.0)]


def test_full_direction_is_shared() -> None:
    pool = SenderPool()
    pool.add("a", Node(100.0))
    pool.allocate(100.0, "", 4)
    assert pool.allocate(80.0, "", 4) == [SourceAllocation("a", 50.0)]
    assert SenderPool().allocate(80.0, "", 4) == []
