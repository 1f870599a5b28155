"""The level that everyone can have, and what a pool of senders gives."""

from __future__ import annotations

import pytest

from torchrelay.scheduler.planning.levels import Runner, level
from torchrelay.scheduler.planning.nodes import Node, Uplink
from torchrelay.scheduler.planning.pool import Draw, Pool


def test_with_enough_of_everything_the_level_is_the_fastest_link() -> None:
    assert level(100.0, [Runner(90, 100), Runner(50, 100)]) == 90


def test_nobody_gets_more_than_the_sources_send() -> None:
    assert level(40.0, [Runner(90, 100), Runner(80, 100)]) == pytest.approx(40, rel=1e-5)


def test_uplinks_are_shared_by_all_who_could_take_more() -> None:
    # 100 from the source and 20 from the first: the second's own uplink comes too late for anyone.
    assert level(100.0, [Runner(90, 20), Runner(90, 10)]) == pytest.approx(60, rel=1e-5)


def test_who_takes_less_leaves_more_to_the_others() -> None:
    assert level(100.0, [Runner(90, 0), Runner(30, 0)]) == pytest.approx(70, rel=1e-5)


def test_who_is_being_fed_already_only_gives() -> None:
    assert level(10.0, [Runner(90, 40, 0), Runner(80, 0)]) == pytest.approx(50, rel=1e-5)
    assert level(0.0, [Runner(90, 40), Runner(30, 100, 0)]) == pytest.approx(30, rel=1e-5)


def test_the_tightest_fit_leaves_large_senders_for_large_needs() -> None:
    pool = Pool({})
    for store, out in (("a", 100.0), ("b", 60.0), ("c", 50.0)):
        pool.add(store, Node(out))
    assert pool.draw(55.0, "", 4) == [Draw("b", 55.0)]
    assert pool.draw(100.0, "", 4) == [Draw("a", 100.0)]


def test_a_free_direction_comes_before_a_tighter_fit() -> None:
    pool = Pool({})
    pool.add("a", Node(100.0))
    pool.add("b", Node(300.0))
    pool.draw(40.0, "", 4)  # from a, which has 60 left
    assert pool.draw(60.0, "", 4) == [Draw("b", 60.0)]


def test_what_no_one_has_alone_is_pieced_together_largest_first() -> None:
    pool = Pool({})
    for store, out in (("a", 30.0), ("b", 60.0), ("c", 50.0)):
        pool.add(store, Node(out))
    assert pool.draw(100.0, "", 4) == [Draw("b", 60.0), Draw("c", 40.0)]
    assert pool.draw(100.0, "", 1) == [Draw("a", 30.0)]


def test_when_all_is_taken_a_direction_is_shared() -> None:
    pool = Pool({})
    pool.add("a", Node(100.0))
    pool.draw(100.0, "", 4)
    assert pool.draw(80.0, "", 4) == [Draw("a", 50.0)]
    assert Pool({}).draw(80.0, "", 4) == []


def test_an_uplink_gives_what_it_has_left() -> None:
    pool = Pool({"x": Uplink(residual_up=70.0), "y": Uplink(residual_down=50.0)})
    pool.add("a", Node(1000.0, leaf="x"))
    assert pool.draw(100.0, "y", 1) == [Draw("a", 50.0)]
    assert pool.draw(100.0, "z", 1) == [Draw("a", 20.0)]
    assert pool.draw(100.0, "x", 1) == [Draw("a", 100.0)]
