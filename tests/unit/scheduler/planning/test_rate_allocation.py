"""The fair rate of targets that are fed together."""

from __future__ import annotations

import pytest

from torchrelay.scheduler.planning.rate_allocation import ChainMember, fair_rate


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
