"""The fair rate of targets that are fed together."""

from __future__ import annotations

import pytest

from torchrelay.scheduler.policy.relay.planning.rate_allocation import ChainMember, fair_rate


def test_fair_rate_is_fastest_link_without_shortage() -> None:
    assert fair_rate(100.0, [ChainMember(90, 100), ChainMember(50, 100)]) == 90


def test_fair_rate_is_at_most_what_sources_send() -> None:
    assert fair_rate(40.0, [ChainMember(90, 100), ChainMember(80, 100)]) == pytest.approx(40, rel=1e-5)


def test_uplinks_are_shared_by_targets_with_capacity() -> None:
    # 100 from the source and 20 from the first: the second's own uplink comes too late for anyone.
    assert fair_rate(100.0, [ChainMember(90, 20), ChainMember(90, 10)]) == pytest.approx(60, rel=1e-5)


def test_slow_target_leaves_more_to_others() -> None:
    assert fair_rate(100.0, [ChainMember(90, 0), ChainMember(30, 0)]) == pytest.approx(70, rel=1e-5)


def test_fed_member_only_sends() -> None:
    assert fair_rate(10.0, [ChainMember(90, 40, 0), ChainMember(80, 0)]) == pytest.approx(50, rel=1e-5)
    assert fair_rate(0.0, [ChainMember(90, 40), ChainMember(30, 100, 0)]) == pytest.approx(30, rel=1e-5)
