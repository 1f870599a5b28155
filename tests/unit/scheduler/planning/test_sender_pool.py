"""What a pool of senders allocates."""

from __future__ import annotations

from torchrelay.scheduler.planning.nodes import Node
from torchrelay.scheduler.planning.sender_pool import SenderPool, SourceAllocation


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
