"""The price of a slot: late requests against seconds of a slot."""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.scheduler.policy.autoscaling.price import (
    IdleGaps,
    IdlePlan,
    held_s,
    lateness,
    lateness_weight,
    least_keep_s,
    least_plan,
    least_saved,
    num_gained,
    num_lost,
    num_saved,
)


@given(
    st.integers(1, 8), st.floats(0, 100), st.floats(0, 12), st.floats(0.1, 5), st.floats(1, 100)
)  # fmt: skip
def test_lateness_integrates_excess_over_target(
    num_instances: int, backlog_s: float, load: float, target_s: float, horizon_s: float
) -> None:
    steps = 2000
    excess = (
        max(backlog_s - num_instances * target_s + (load - num_instances) * horizon_s * (step + 0.5) / steps, 0.0)
        for step in range(steps)
    )
    measured = sum(excess) * horizon_s / steps
    computed = lateness(num_instances, backlog_s, load, target_s, horizon_s)
    assert computed == pytest.approx(measured, rel=0.01, abs=0.01 * horizon_s)


def test_the_worked_example_of_the_docs() -> None:
    """An instance, a queue of 6 s, 5 requests per second of 0.1 s each, 0.5 s to wait; a cold start is worth 60 s."""
    assert lateness(1, 6.0, 0.5, 0.5, 60.0) == pytest.approx(30.25)  # 5.5 s, gone in 11 s
    saved = num_saved(1, 6.0, 0.5, 0.1, 0.5, load_s=1.0, horizon_s=60.0)
    assert saved == pytest.approx((5.0**2 / 1.0 - 4.5**2 / 3.0) / 0.05)  # 365: it pays
    assert held_s(1, 6.0, 1.0, 60.0) == 60.0
    assert saved > least_saved(1.0, 60.0, 60.0) == pytest.approx(1 + 1 / 60)
    assert num_saved(1, 6.0, 0.5, 0.1, 0.5, load_s=12.0, horizon_s=60.0) == 0.0  # it would come after the queue
    assert num_lost(0.1, 4.0, 0.5) == pytest.approx(0.4 * (1 + math.log(5)))  # 0.4 requests: 1.04
    assert num_lost(1.5, 14.0, 1.0) == pytest.approx(21 * (1 + math.log(8)))  # 21 requests: 65
    assert num_lost(2.0, 4.0, 0.5) == pytest.approx(20.9, abs=0.1)
    assert num_gained(0.1, 1, 0.0) == 1
    assert num_gained(0.5, 12, 10.0) == 17


def test_late_request_loses_little_more() -> None:
    weights = [lateness_weight(number * 1.0, 0.5) for number in range(50)]
    added = [later - sooner for sooner, later in pairwise(weights)]
    assert weights[0] == 1.0 and added == sorted(added, reverse=True) and weights[-1] < 6.0


def test_more_instances_save_less_each() -> None:
    saved = [num_saved(number, 20.0, 2.5, 0.1, 0.5, 1.0, 60.0) for number in range(1, 8)]
    assert saved == sorted(saved, reverse=True) and saved[0] > 1000 and saved[-1] < least_saved(1.0, 60.0, 60.0) * 200
    assert num_saved(4, 0.0, 2.5, 0.1, 0.5, 1.0, 60.0) == 0.0


def test_keep_time_would_have_cost_least() -> None:
    assert least_keep_s([2.0] * 8 + [300.0] * 8, 60.0) == 2.0  # bursts: the next comes in 2 s, or not for long
    assert least_keep_s([100.0] * 8, 60.0) == 0.0  # never in time
    assert least_keep_s([50.0] * 8, 60.0) == 60.0  # nothing was lost by it
    assert least_keep_s([], 60.0) == 60.0


def test_periodic_model_is_loaded_before_its_request() -> None:
    about_ten_minutes = [600.0 + number % 5 for number in range(16)]
    plan = least_plan(about_ten_minutes, 60.0, 10.0)
    assert plan == IdlePlan(0.0, 590.0, 604.0)  # a cold start of 10 s, and 4 s more at most
    assert plan.cost(602.0, 60.0) == 12.0
    assert plan.cost(605.0, 60.0) == plan.cost(700.0, 60.0) == 14.0 + 60.0
    bursts = [2.0] * 16 + about_ten_minutes
    assert least_plan(bursts, 60.0, 10.0) == IdlePlan(2.0, 590.0, 604.0)
    unlike = [100.0 * number for number in range(1, 17)]
    assert least_plan(unlike, 60.0, 10.0) == IdlePlan(0.0), "to load 16 times too early costs more than a cold start"


@given(st.lists(st.floats(0.01, 300), min_size=1, max_size=24), st.floats(1, 100), st.floats(0.1, 20))
def test_plan_costs_at_most_best_keep_time(gaps: list[float], break_even_s: float, load_s: float) -> None:
    plan = least_plan(gaps, break_even_s, load_s)
    kept = IdlePlan(least_keep_s(gaps, break_even_s))
    paid, of_kept = (sum(item.cost(gap, break_even_s) for gap in gaps) for item in (plan, kept))
    assert paid <= of_kept + 1e-6
    assert math.isinf(plan.wake_s) or plan.keep_s < plan.wake_s <= plan.until_s <= plan.wake_s + break_even_s + 1e-6


def cost(gap_s: float, kept_s: float, break_even_s: float) -> float:
    return gap_s if gap_s <= kept_s else kept_s + break_even_s


@given(st.lists(st.floats(0.01, 300), min_size=1, max_size=12), st.floats(1, 100))
def test_wake_time_would_have_cost_least(gaps: list[float], break_even_s: float) -> None:
    kept_s = least_keep_s(gaps, break_even_s)
    assert kept_s <= break_even_s
    least = sum(cost(gap, kept_s, break_even_s) for gap in gaps)
    for other_s in [0.0, break_even_s, *gaps]:
        if other_s <= break_even_s:
            assert least <= sum(cost(gap, other_s, break_even_s) for gap in gaps) + 1e-6


def test_next_use_is_expected_by_longer_gaps() -> None:
    gaps = IdleGaps()
    assert gaps.return_s(40.0) == 40.0, "nothing is known: as long again"
    assert gaps.return_s(0.0) == 1.0
    for gap_s in (5.0, 600.0, 600.0, 600.0):
        gaps.add(gap_s, 60.0, 2.0)
    assert gaps.return_s(540.0) == pytest.approx((540.0 + 3 * 60.0) / 4)
    assert gaps.return_s(700.0) == 700.0, "longer than all gaps: as long again"
    assert gaps.return_s(2.0) == pytest.approx((2.0 + 3.0 + 3 * 598.0) / 5)


@given(st.lists(st.floats(0.01, 300), min_size=1, max_size=64), st.floats(1, 100))
def test_plan_costs_at_most_twice_optimum_and_two_loads(gaps: list[float], break_even_s: float) -> None:
    """A model that flaps on purpose: each gap is just longer than its slot was kept, as often as it likes."""
    for flaps, misses in product((False, True), repeat=2):
        history, paid_s, known_s = IdleGaps(), 0.0, 0.0
        for gap in gaps:
            plan = history.plan(break_even_s, 1.0)
            gap = plan.keep_s + 0.01 if flaps else gap
            if misses and not math.isinf(plan.until_s):
                gap = plan.until_s + 0.01
            paid_s += plan.cost(gap, break_even_s)
            known_s += min(gap, break_even_s)
            history.add(gap, break_even_s, 1.0)
            assert paid_s <= 2 * known_s + 2 * break_even_s + 1e-6
