"""The fronts and bounds of the simulation's bench."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bench.simulation.bounds import hindsight_device_s, pooled_share_in_time
from bench.simulation.cases import FLEETS, MODELS, WARM_UP_S, Case, generated, run
from bench.simulation.cases import case_of as bench_case_of
from bench.simulation.fronts import Front, Point, device_ratio, value_ratio
from torchrelay.sim.scenario import Request
from torchrelay.sim.setup import Knobs

FRONT = Front([Point(10.0, 0.5), Point(20.0, 0.1), Point(30.0, 0.1), Point(16.0, 0.4), Point(40.0, 0.0)])


def case_of(*requests: Request) -> Case:
    return Case("made", "A", 1, requests)


def request(at: float, number: int = 0, num_prompt: int = 100, num_output: int = 1) -> Request:
    """A request ``at`` seconds after the warm-up, to the model of this number."""
    return Request(f"{number} {at}", WARM_UP_S + at, MODELS[number].name, num_prompt, num_output)


def test_front_is_the_hull_without_points_above_it() -> None:
    assert list(FRONT.points) == [(10.0, 0.5), (20.0, 0.1), (40.0, 0.0)]
    assert FRONT.device_s(0.3) == pytest.approx(15.0) and FRONT.value(15.0) == pytest.approx(0.3)
    assert FRONT.device_s(0.7) == 10.0 and FRONT.value(50.0) == 0.0
    assert FRONT.value(5.0) == 0.5, "the cheapest setting counts if none is as cheap"
    assert math.isinf(Front([Point(1.0, 0.2)]).device_s(0.1))


def test_ratios_compare_at_equal_values_and_equal_device_times() -> None:
    twice = Front(Point(2 * point.device_s, point.value) for point in FRONT.points)
    assert device_ratio(FRONT, twice) == pytest.approx(0.5) and device_ratio(twice, FRONT) == pytest.approx(2.0)
    steep = Front([Point(10.0, 4.0), Point(20.0, 2.0)])
    half = Front([Point(10.0, 2.0), Point(20.0, 1.0)])
    assert value_ratio(steep, steep) == 1.0 and value_ratio(half, steep) == pytest.approx(0.5)
    assert value_ratio(steep, Front([Point(15.0, 6.0)])) == pytest.approx(0.5), "3 between 4 and 2"
    coarse = Front([Point(100.0, 0.3)])
    assert device_ratio(coarse, FRONT) == pytest.approx(10.0), "at 0.5; what it cannot reach does not count"
    assert device_ratio(Front([Point(100.0, 0.6)]), FRONT) == pytest.approx(10.0), "if it reaches nothing, at its best"


def test_hindsight_keeps_short_gaps_and_loads_before_long_ones() -> None:
    model, fleet = MODELS[0], FLEETS["A"]
    load_s = model.pack_bytes / fleet.device_bytes_per_s
    prompt_s = model.latency.prefill_s(100)
    short = case_of(request(0.0), request(0.5 * load_s), request(100.0), request(200.0))
    kept_s = 0.5 * load_s + prompt_s
    expected_s = kept_s + load_s + prompt_s + load_s  # the last request ends after the last arrival
    assert hindsight_device_s(short, 0, 0) == pytest.approx(expected_s, rel=0.01)


def test_hindsight_gives_up_what_costs_most() -> None:
    case = case_of(request(0.0), request(50.0, number=3), request(100.0))
    all_s, without_one_s = (hindsight_device_s(case, num_late, 0) for num_late in (0, 1))
    large = MODELS[3]
    assert large.num_devices == 4
    least_s = large.pack_bytes / FLEETS["A"].device_bytes_per_s
    assert all_s - without_one_s >= 0.5 * least_s, "costs of a late request are powers of two"


def test_pooled_slots_give_up_the_longest_prompts() -> None:
    num_slots = 8
    second = int(MODELS[0].prefill_tokens_per_s)
    light = [replace(request(0.0), request_id=f"{number}") for number in range(20)]
    assert pooled_share_in_time(case_of(*light)) == 1.0
    # Each takes a second of a slot and has 1.65 s: 13 of 20 are in time on eight slots.
    heavy = [replace(request(0.0, num_prompt=second), request_id=f"{number}") for number in range(20)]
    assert pooled_share_in_time(case_of(*heavy)) == pytest.approx(math.floor(1.65 * num_slots) / 20)


def test_bound_in_hindsight_is_below_every_system() -> None:
    case = bench_case_of("generated", generated(1), "B", 3, 10.0)
    for system in ("ours", "blitzscale_min0"):
        outcome = run(case, system, Knobs(10.0, 4))
        assert 0 < hindsight_device_s(case, outcome.num_late, outcome.num_open) < outcome.device_s
        assert outcome.num_requests == len(case.counted)
