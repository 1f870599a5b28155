"""A transfer that falls short of its plan gets other sources; one whose sources are slow themselves does not."""

from __future__ import annotations

from dataclasses import replace

from torchrelay.scheduler.policy.relay.planning import Node, ReceiveProgress
from torchrelay.scheduler.policy.relay.replan import (
    REPLAN_COOLDOWN_S,
    SLOW_AFTER_S,
    is_replan_due,
    replanned_edge,
    with_slowness,
)
from torchrelay.scheduler.policy.relay.transfers import PlannedSource, Transfer

TRANSFER = Transfer("p", "s2", 1000, 10.0, (PlannedSource("s1", 100.0),), 100.0)


def test_half_the_planned_rate_is_not_slow() -> None:
    assert with_slowness(TRANSFER, 50.0, ["s1"], {}, now=20.0) is TRANSFER
    slow = with_slowness(TRANSFER, 49.0, ["s1"], {}, now=20.0)
    assert slow.slow_since == 20.0
    assert with_slowness(slow, 10.0, ["s1"], {}, now=21.0) is slow
    assert with_slowness(slow, 80.0, ["s1"], {}, now=21.0).slow_since == 0.0


def test_replan_is_due_after_delay_then_cools_down() -> None:
    slow = with_slowness(TRANSFER, 10.0, ["s1"], {}, now=20.0)
    assert (
        not is_replan_due(TRANSFER, 30.0) and not is_replan_due(slow, 20.0) and is_replan_due(slow, 20.0 + SLOW_AFTER_S)
    )
    again = replace(TRANSFER, slow_since=22.0, replan_checked_at=21.0)
    assert not is_replan_due(again, 21.0 + REPLAN_COOLDOWN_S - 0.1) and is_replan_due(again, 21.0 + REPLAN_COOLDOWN_S)


def test_follower_of_slow_copy_is_not_slow() -> None:
    assert with_slowness(TRANSFER, 20.0, [], {"s1": ReceiveProgress(0.5, 21.0)}, now=20.0) is TRANSFER
    assert with_slowness(TRANSFER, 20.0, [], {"s1": ReceiveProgress(0.5, 90.0)}, now=20.0).slow_since
    assert with_slowness(
        TRANSFER, 20.0, ["s1"], {"s1": ReceiveProgress(0.5, 21.0)}, now=20.0
    ).slow_since  # it has all there is


def test_replan_names_better_source_before_target() -> None:
    nodes = {"s0": Node(90.0), "s1": Node(10.0), "s3": Node(1000.0), "s2": Node(residual_in=100.0)}
    edge = replanned_edge(TRANSFER, 10.0, ["s0"], ["s1", "s2", "s3"], nodes, {}, missing_bytes=1000.0)
    assert edge is not None and edge.target == "s2"
    assert edge.striped == ("s0", "s1") and "s3" not in edge.sources
    assert edge.bytes_per_s == 100.0


def test_replan_needs_enough_gain_and_other_sources() -> None:
    nodes = {"s0": Node(14.0), "s1": Node(1.0), "s2": Node(residual_in=14.0)}
    assert replanned_edge(TRANSFER, 10.0, ["s0"], ["s1", "s2"], nodes, {}, 1000.0) is None
    assert replanned_edge(TRANSFER, 10.0, ["s1"], ["s2"], {}, {}, 1000.0) is None  # s1 is all there is
    assert replanned_edge(TRANSFER, 10.0, [], ["s2"], {}, {}, 1000.0) is None
