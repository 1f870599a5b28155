"""A relay that falls short of its plan gets other sources; one whose sources are slow themselves does not."""

from __future__ import annotations

from torchrelay.scheduler.planning import Arriving, Arrow, Node, RunningRelay
from torchrelay.scheduler.planning.departures import HOLD_S, SLOW_FOR_S, is_due, redrawn, watched

RELAY = RunningRelay.of("p", Arrow("s2", ("s1", "s0", "remote"), bytes_per_s=100.0), now=10.0, urgent=True)


def test_half_the_planned_rate_is_still_the_plan() -> None:
    assert watched(RELAY, 50.0, ["s1"], {}, now=20.0) is RELAY
    slow = watched(RELAY, 49.0, ["s1"], {}, now=20.0)
    assert slow.slow_since == 20.0
    assert watched(slow, 10.0, ["s1"], {}, now=21.0) is slow
    assert watched(slow, 80.0, ["s1"], {}, now=21.0).slow_since == 0.0


def test_it_is_due_after_a_while_and_then_left_alone() -> None:
    slow = watched(RELAY, 10.0, ["s1"], {}, now=20.0)
    assert not is_due(RELAY, 30.0) and not is_due(slow, 20.0) and is_due(slow, 20.0 + SLOW_FOR_S)
    again = RunningRelay("p", "s2", "s0", 10.0, slow_since=22.0, replanned_at=21.0)
    assert not is_due(again, 21.0 + HOLD_S - 0.1) and is_due(again, 21.0 + HOLD_S)


def test_who_follows_a_slow_copy_as_fast_as_it_comes_is_not_slow() -> None:
    assert watched(RELAY, 20.0, [], {"s1": Arriving(0.5, 21.0)}, now=20.0) is RELAY
    assert watched(RELAY, 20.0, [], {"s1": Arriving(0.5, 90.0)}, now=20.0).slow_since
    assert watched(RELAY, 20.0, ["s1"], {"s1": Arriving(0.5, 21.0)}, now=20.0).slow_since  # it has all there is


def test_a_better_source_is_named_and_none_that_follows_the_target() -> None:
    nodes = {"s0": Node(90.0), "s1": Node(10.0), "s3": Node(1000.0), "s2": Node(residual_in=100.0)}
    arrow = redrawn(RELAY, 10.0, ["s0"], ["s1", "s2", "s3"], nodes, {}, missing_bytes=1000.0)
    assert arrow is not None and arrow.target == "s2"
    assert arrow.striped == ("s0", "s1") and "s3" not in arrow.sources
    assert arrow.bytes_per_s == 100.0


def test_nothing_is_changed_for_little_or_for_the_same() -> None:
    nodes = {"s0": Node(14.0), "s1": Node(1.0), "s2": Node(residual_in=14.0)}
    assert redrawn(RELAY, 10.0, ["s0"], ["s1", "s2"], nodes, {}, 1000.0) is None
    assert redrawn(RELAY, 10.0, ["s1"], ["s2"], {}, {}, 1000.0) is None  # s1 is all there is
    assert redrawn(RELAY, 10.0, [], ["s2"], {}, {}, 1000.0) is None
