"""How many instances a model is worth: arrivals and the price of a slot."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scheduler.policy.autoscaling.listed_cluster import crowded_demand
from tests.unit.scheduler.policy.paper_cluster import a_model
from torchrelay.scheduler.policy.autoscaling.bids import Bid
from torchrelay.scheduler.policy.autoscaling.growth import wanted_instances
from torchrelay.scheduler.policy.autoscaling.version_rotation import MOST_PER_S, VersionTurns
from torchrelay.scheduler.policy.config import TURN_S, PolicyConfig
from torchrelay.scheduler.policy.demand.demand import Demand
from torchrelay.scheduler.policy.demand.lateness import Fluid, displaced, load_cost, nobody, weight
from torchrelay.scheduler.policy.demand.usage import MEAN_S, NEVER, WINDOW_S, ArrivalRate, Gaps, Usage
from torchrelay.scheduler.policy.types import BOTH, Role

RULES = PolicyConfig()


def crowded(num_waiting: int = 40, **changes: object) -> Demand:
    return crowded_demand(a_model(max_instances=5), num_waiting, **changes)


def wanted(demand: Demand, num_instances: int, load_s: float) -> int:
    """Per role."""
    numbers = wanted_instances(demand, Counter(dict.fromkeys(Role, num_instances)), load_s, RULES)
    assert numbers[Role.PREFILL] == numbers[Role.DECODE]
    return numbers[Role.PREFILL]


def test_wanted_instances_save_more_than_they_cost() -> None:
    quiet = Demand(a_model(), 0, 0, 0.0)
    assert wanted(quiet, 1, 0.0) == 1
    assert wanted(replace(quiet, num_waiting=5), 2, 0.0) == 2  # a moment's wait is no reason
    assert wanted(crowded(12), 1, 0.5) == 2
    assert wanted(crowded(1000), 1, 0.5) == 5
    assert wanted(crowded(), 1, 12.0) == 1  # the queue is gone before it has loaded
    assert wanted(crowded(load=1.1), 1, 12.0) == 2  # this one only grows
    assert wanted(crowded(0, num_late_before=2), 1, 12.0) == 2
    assert wanted(crowded(0, num_late_before=1), 1, 12.0) == 1
    assert wanted(crowded(0, num_late_before=9), 1, 61.0) == 1  # worth less than its load


def test_queue_of_minutes_outweighs_any_cold_start() -> None:
    """Only one second of it was looked at, in which one more instance computes a quarter of a prompt."""
    flood = Demand(a_model(max_instances=3), 60, 0, 0.0, backlog_s=240.0, target_s=2.0)
    assert wanted(flood, 1, 0.1) == wanted(flood, 1, 2.0) == 3
    assert wanted(replace(flood, late_s=1.0), 1, 2.0) == 1, "a slot for minutes costs more than requests of 1 s each"


FLUIDS = st.builds(
    Fluid,
    backlog_s=st.floats(0, 100),
    load=st.floats(0, 12),
    request_s=st.floats(0.01, 2),
    slack_s=st.floats(0.1, 5),
    late_s=st.floats(1, 100),
    batch_s=st.sampled_from([0.0, 10.0]),
)


@given(FLUIDS, st.integers(1, 8), st.floats(1, 100))
def test_late_requests_are_those_of_the_queue_and_of_arrivals(fluid: Fluid, number: int, horizon_s: float) -> None:
    """The closed form is the sum over places in the queue, and over arrivals, each with the wait before it."""
    steps = 4000
    excess_s = fluid.backlog_s - number * fluid.batch_s
    places = (max(excess_s, 0.0) * (step + 0.5) / steps for step in range(steps))
    waiting = sum(weight(place_s / number, fluid.slack_s) for place_s in places) * max(excess_s, 0.0) / steps
    times = (horizon_s * (step + 0.5) / steps for step in range(steps))
    waits_s = ((excess_s + (fluid.load - number) * at) / number for at in times)
    arriving = sum(weight(wait_s, fluid.slack_s) for wait_s in waits_s) * fluid.load * horizon_s / steps
    late = fluid.late(number, horizon_s, fluid.backlog_s)
    assert late * fluid.request_s == pytest.approx(
        waiting + arriving, rel=0.01, abs=0.01 * (horizon_s + max(excess_s, 0.0))
    )


@given(FLUIDS, st.integers(1, 7), st.floats(1, 100), st.floats(0.1, 10))
def test_late_requests_grow_with_work_and_fall_with_instances(
    fluid: Fluid, number: int, horizon_s: float, more: float
) -> None:
    late = fluid.late(number, horizon_s, fluid.backlog_s)
    assert late >= 0
    is_in_time = fluid.backlog_s <= number * (fluid.batch_s + fluid.slack_s) and fluid.load <= number
    assert not is_in_time or late == 0
    nearly = late * (1 - 1e-6) - 1e-6
    assert fluid.late(number, horizon_s, fluid.backlog_s + more) >= nearly
    assert fluid.late(number, horizon_s + more, fluid.backlog_s) >= nearly
    assert replace(fluid, load=fluid.load + more).late(number, horizon_s, fluid.backlog_s) >= nearly
    assert late >= fluid.late(number + 1, horizon_s, fluid.backlog_s) * (1 - 1e-6) - 1e-6


@given(st.integers(0, 50), st.floats(0.1, 20))
def test_waiting_request_raises_its_models_bid(num_waiting: int, held_s: float) -> None:
    """It is in no ask: what a slot costs its own model counts arrivals only."""
    fewer, more = (Bid(crowded(number), BOTH, "", "").num_gained(held_s) for number in (num_waiting, num_waiting + 1))
    assert more > fewer


@given(FLUIDS, st.integers(1, 8), st.floats(0, 12), st.integers(1, 8))
def test_wanted_number_saves_most_beyond_its_cost(fluid: Fluid, number: int, load_s: float, most: int) -> None:
    def gain(wanted: int) -> float:
        each = range(number, wanted)
        return sum(fluid.num_saved(n, load_s) - fluid.least_saved(n, load_s) for n in each)

    wanted = fluid.wanted(number, load_s, most)
    assert number <= wanted <= max(most, number)
    assert all(gain(wanted) >= gain(other) - 1e-9 for other in range(number, most + 1))


def test_the_worked_example_of_the_docs() -> None:
    """An instance, a queue of 6 s, 5 requests per second of 0.1 s each, 0.5 s to wait; a late request costs 60 s."""
    fluid = Fluid(6.0, 0.5, 0.1, 0.5, 60.0)
    alone, shared = fluid.late(1, 10.0, 5.5), fluid.late(2, 10.0, 5.5)  # 5.5 s are left once the other is loaded
    assert alone == pytest.approx(263.8, abs=0.1) and shared == pytest.approx(125.0, abs=0.1)
    assert fluid.num_saved(1, load_s=1.0) == alone - shared
    assert fluid.held_s(1, 1.0) == 61.0 and fluid.least_saved(1, 1.0) == pytest.approx(62 / 60)
    assert fluid.num_saved(1, load_s=12.0) == 0.0, "it would come after the queue"
    assert weight(0.5, 0.5) == 0.0 and weight(4.0, 0.5) == pytest.approx(1 + math.log(8))
    assert nobody(1, 0.1, 0.5, 4.0) == pytest.approx(1 + math.log(8) + 0.05 * 8 * math.log(8))
    assert displaced(0, 0.1, 0.5, 4.0) == pytest.approx(0.05 + 0.05 * 8 * math.log(8))
    assert displaced(1, 0.1, 2.0, 1.0) == pytest.approx(1.1), "in time, but moved"
    assert load_cost(1.0, 0.1, 2.0, 60.0) == 1.0
    assert load_cost(4.0, 0.1, 0.5, 60.0) == pytest.approx(4.0 + 60 * nobody(1, 0.1, 0.5, 4.0))


def test_next_use_is_expected_by_longer_gaps() -> None:
    gaps = Gaps()
    assert gaps.next_use_s(40.0) == 40.0, "nothing is known: as long again"
    assert gaps.next_use_s(0.0) == 1.0
    for gap_s in (5.0, 600.0, 600.0, 600.0):
        gaps.add(gap_s, 60.0)
    assert gaps.next_use_s(540.0) == pytest.approx((540.0 + 3 * 60.0) / 4)
    assert gaps.next_use_s(700.0) == 700.0, "longer than all gaps: as long again"
    assert gaps.next_use_s(2.0) == pytest.approx((2.0 + 3.0 + 3 * 598.0) / 5)


def test_periodic_model_is_loaded_before_its_request() -> None:
    gaps = Gaps()
    for number in range(16):
        assert (gaps.window(10.0, 60.0) == NEVER) is (number < 8)
        gaps.add(600.0 + number % 5, 60.0)
    assert gaps.window(10.0, 60.0) == (585.0, 604.0)
    assert gaps.window(10.0, 3.0) == NEVER, "the gaps differ by more than the slot is kept for"
    for number in range(16):
        gaps.add(2.0 + 100.0 * number, 60.0)
    assert gaps.window(10.0, 60.0) == NEVER


@given(st.lists(st.floats(0.01, 300), min_size=1, max_size=64), st.floats(1, 100), st.booleans())
def test_kept_slot_costs_at_most_twice_optimum_and_two_loads(gaps: list[float], cold_s: float, flaps: bool) -> None:
    """``flaps``: each gap is just longer than the slot was kept, as often as a model likes."""
    history, paid_s, optimum_s = Gaps(), 0.0, 0.0
    for gap_s in gaps:
        keep_s = history.keep_s(cold_s)
        if flaps:
            gap_s = keep_s + 0.01
        paid_s += gap_s if gap_s <= keep_s else keep_s + cold_s
        optimum_s += min(gap_s, cold_s)
        history.add(gap_s, cold_s)
    assert paid_s <= 2 * optimum_s + 2 * cold_s + 1e-6


def test_model_whose_gaps_are_short_or_long_is_kept_for_less_than_the_break_even() -> None:
    history = Gaps()
    for _ in range(3):
        for gap_s in [1.0, 2.0] * 4 + [500.0] * 8:
            history.add(gap_s, 64.0)
    assert history.keep_s(64.0) <= 8.0


def test_rate_covers_last_seconds() -> None:
    history = Usage()
    assert history.rate(0.0) == ArrivalRate()
    for number in range(20):
        history.arrive(100, 0.5, 60.0, number * 0.5, is_unused=False)
    assert history.rate(9.9) == ArrivalRate(20 / WINDOW_S, 2000 / WINDOW_S)
    assert history.rate(14.5) == ArrivalRate(10 / WINDOW_S, 1000 / WINDOW_S)
    assert history.rate(40.0) == ArrivalRate()


def test_long_run_rate_is_expected_between_bursts() -> None:
    """The most popular model, idle between two bursts, gave its slot to the first request of any other."""
    history = Usage()
    assert history.expected_per_s(0.0) == 0.0
    for burst in range(10):
        for number in range(50):
            history.arrive(10, 0.5, 60.0, burst * 50.0 + number * 0.1, is_unused=False)
    assert history.expected_per_s(455.0) == 5.0  # of late
    assert history.rate(499.0) == ArrivalRate() and 0.9 < history.expected_per_s(499.0) < 1.2
    assert history.expected_per_s(499.0 + 5 * MEAN_S) < 0.01
    assert history.expected_per_s(1e9) < 1e-9


def test_gaps_are_times_without_requests() -> None:
    history = Usage()
    history.arrive(100, 0.5, 60.0, 0.0, is_unused=True)
    for number in range(1, 17):
        history.arrive(100, 0.5, 60.0, 1000.0 * number - 995.0, is_unused=False)
        gap_s = 2.0 if number % 2 else 500.0
        history.last_used = 1000.0 * number - gap_s  # an answer ends so long before the next request
        history.arrive(100, 0.5, 64.0, 1000.0 * number, is_unused=True)
    assert history.gaps.keep_s(64.0) == 2.0


VERSIONS = [f"v{number:03d}" for number in range(100)]


def test_single_version_has_ten_turns_per_second() -> None:
    turns = VersionTurns(0.5)
    times = [number / 50 for number in range(51)]
    assert [now for now in times if turns.due(["v"], now)] == pytest.approx([number / 10 for number in range(11)])


@given(gaps=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=50), number=st.integers(1, 30))
def test_every_version_has_a_turn_per_round(gaps: list[float], number: int) -> None:
    turns, now = VersionTurns(0.5), 0.0
    seen_at = dict.fromkeys(turns.due(VERSIONS[:number], now), now)
    assert len(seen_at) == number
    for gap in gaps:
        before, now = now, now + gap
        seen_at |= dict.fromkeys(turns.due(VERSIONS[:number], now), now)
        assert all(now - at <= 0.5 + gap or at > before for at in seen_at.values())


def test_thousands_of_versions_have_turns_less_often() -> None:
    """A turn of 10,000 versions evaluated 400 at once, for tens of milliseconds."""
    turns, many = VersionTurns(0.5), {f"v{number:05d}": None for number in range(10_000)}
    turns.due(many, 0.0)
    seen = [version_id for step in range(1, 301) for version_id in turns.due(many, step * TURN_S)]
    assert len(seen) == len(set(seen)) and len(seen) == pytest.approx(300 * TURN_S * MOST_PER_S, abs=1)
