"""Changes of settings, and which of them save most, on small days whose best change is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.sim.advice.advice import (
    MOST_LOST,
    Check,
    DayPrices,
    Result,
    Saving,
    best_savings,
    checks_of,
    simulate,
)
from torchrelay.sim.advice.changes import Change, changes_of
from torchrelay.sim.advice.workload import Measured, Workload, stretch_of
from torchrelay.sim.fleets import served_model
from torchrelay.sim.scenario import Fleet, Request, ServedModel

SMALL = replace(served_model("t/small", 1, 8, 32, 131072, 0.3, 15e3, 0.1), ttft_prompt_factor=0.0)
PAIR = replace(served_model("t/pair", 2, 24, 40, 163840, 2.0, 12e3, 0.1), ttft_prompt_factor=0.0)
HOST = Fleet(1, (1,), 12.5e9, 25e9, 2.5e9, 480 * 10**9)


def workload(models: Sequence[ServedModel], fleet: Fleet, every_s: float, number: int) -> Workload:
    requests = [Request(f"r{n}", n * every_s, models[n % len(models)].name, 500, 50) for n in range(number)]
    return Workload(models, fleet, requests, PolicyConfig(), every_s * number)


def savings_of(base: Workload, prices: DayPrices | None = None) -> Sequence[Saving]:
    result = simulate(base)
    changed = [(change, simulate(change.workload)) for change in changes_of(base, result.late)]
    return best_savings((base, result), changed, base.requests_per_day, prices or DayPrices())


def test_cold_calls_with_free_slot_are_best_served_by_minimum() -> None:
    base = workload([SMALL], HOST, 300.0, 4)
    assert simulate(base).late == {"t/small": 4}
    best = savings_of(base)[0]
    assert best.change.title == "a minimum for t/small"
    assert best.change.command == "torchrelay models set t/small --min-instances 1"
    assert (best.attained_before, best.attained) == (0.0, 1.0)
    assert best.saved == pytest.approx(base.requests_per_day * 0.01, abs=0.02)


def test_minimum_that_is_hardly_called_is_dropped_if_held_devices_are_paid() -> None:
    kept = replace(SMALL, min_instances=1, ttft_base_s=2.0)
    best = savings_of(workload([kept], HOST, 300.0, 4), DayPrices(pays_held=True))[0]
    assert best.change.title == "no minimum for t/small" and best.attained == 1.0
    assert 40 < best.saved < 24 * 2.5


def test_idle_second_host_is_given_up() -> None:
    base = workload([replace(SMALL, ttft_base_s=2.0)], replace(HOST, num_hosts=2), 5.0, 40)
    best = savings_of(base)[0]
    assert best.change.title == "one host fewer" and best.change.workload.fleet.num_hosts == 1
    assert best.saved == pytest.approx(24 * 2.5, rel=0.05)


def test_changes_are_those_that_the_workload_allows() -> None:
    def titles(base: Workload, late: dict[str, int] | None = None) -> list[str]:
        return [change.title for change in changes_of(base, late or {})]

    one_slot = workload([SMALL], HOST, 1.0, 3)
    assert titles(one_slot, {"t/small": 2}) == [
        "one more host",
        "one more slot per host",
        "a minimum for t/small",
        "shorter idle timeouts",
        "longer idle timeouts",
        "t/small in int8",
    ]
    assert "t/small in int8" not in titles(replace(one_slot, quantized=frozenset(["t/small"])))
    mixed = replace(one_slot, models=[SMALL, PAIR], fleet=replace(HOST, groups=(2, 1, 1), arena_bytes=20 * 10**9))
    fewer = next(change for change in changes_of(mixed, {}) if change.title == "one slot fewer per host")
    assert (
        fewer.workload.fleet.groups == (2, 1)
        and fewer.command == "torchrelay up --prefill-workers 0 --decode-workers 0 --both-workers 2"
    )
    assert "one slot fewer per host" not in titles(fewer.workload)
    assert "twice the host memory" in titles(mixed) and "t/pair in int8" not in titles(mixed)  # it is never called


def test_idle_timeouts_change_the_setting_that_is_in_force() -> None:
    base = workload([SMALL], HOST, 1.0, 3)
    computed = {change.title: change for change in changes_of(base, {})}["longer idle timeouts"]
    assert computed.workload.config == replace(base.config, late_cost_s=120.0)
    fixed = changes_of(replace(base, config=PolicyConfig(idle_timeout_s=30.0)), {})
    assert [change.command for change in fixed if "idle" in change.title] == [
        "torchrelay up --idle-timeout-s 15",
        "torchrelay up --idle-timeout-s 60",
    ]


def test_int8_halves_bytes_and_base_of_decode_steps() -> None:
    (change,) = (each for each in changes_of(workload([SMALL], HOST, 1.0, 3), {}) if "int8" in each.title)
    (model,) = change.workload.models
    assert model.pack_bytes == SMALL.pack_bytes // 2 and change.estimate
    assert model.latency.decode.base_s == SMALL.latency.decode.base_s / 2
    assert change.command == "torchrelay upload DIR --name small --quantize int8"


@pytest.fixture(scope="module")
def base() -> tuple[Workload, Result]:
    base = workload([SMALL], HOST, 5.0, 4)
    return base, simulate(base)


def test_change_that_makes_requests_late_or_saves_nothing_is_no_advice(base: tuple[Workload, Result]) -> None:
    before, result = base

    def cheaper(attained: Callable[[float], float], num_devices: int = 0) -> Sequence[Saving]:
        fleet = replace(HOST, groups=(1,) * num_devices)
        summary = replace(result.summary, attainment=attained(result.summary.attainment))
        change = Change("t", "c", replace(before, fleet=fleet))
        prices = DayPrices(late_request=0.0)
        return best_savings(base, [(change, replace(result, summary=summary))], 4.0, prices)

    assert len(cheaper(lambda share: share)) == 1
    assert len(cheaper(lambda share: share - MOST_LOST)) == 1
    assert not cheaper(lambda share: share - 2 * MOST_LOST)
    assert not cheaper(lambda share: share, num_devices=1)


def test_figures_that_are_off_by_more_than_a_quarter_are_weak(base: tuple[Workload, Result]) -> None:
    workload, result = base
    held_s = result.summary.device_s
    measured = Measured({"r0": True, "r1": False}, {"r0": 9.0}, [(0.0, 5.0), (15.0, 5.0 + 2 * held_s)])
    checks = {check.name: check for check in checks_of(measured, 0.0, workload, result)}
    assert checks["attained"].measured == 0.5
    assert checks["device seconds"].off == pytest.approx(0.5) and checks["device seconds"].is_weak
    assert checks["time of an answer, P50"].measured == 9.0
    assert not Check("attained", 1.0, 0.8).is_weak
    assert checks_of(Measured(), 0.0, workload, result) == []


def test_long_day_is_sampled_where_most_requests_came() -> None:
    quiet = [Request(f"q{n}", 100.0 * n, "t/small", 500, 50) for n in range(50)]
    busy = [Request(f"b{n}", 3000.5 + n, "t/small", 500, 50) for n in range(60)]
    requests = sorted((*quiet, *busy), key=lambda request: request.arrives_at)
    day = Workload([SMALL], HOST, requests, PolicyConfig(), 5000.0)
    assert stretch_of(day, day.simulation_s) == (0.0, day)
    begin, stretch = stretch_of(day, 0.35)
    assert begin <= 3000.5 and stretch.simulation_s <= 0.71, "0.35 s each for the warm-up and what counts"
    assert {request.request_id for request in busy} <= {request.request_id for request in stretch.requests}
    assert stretch.requests[0].arrives_at == 0.0
    assert 0 < stretch.warm_up_s < begin and len(stretch.requests) > len(stretch.counted) >= 60
    assert stretch.requests_per_day == len(stretch.counted) * 86_400 / stretch.span_s


def test_second_with_too_many_requests_is_cut() -> None:
    requests = [
        Request(f"r{number}", number // 500 + number % 500 / 1000, "t/small", 500, 50) for number in range(2000)
    ]
    day = Workload([SMALL], HOST, requests, PolicyConfig(), 4.0)
    begin, stretch = stretch_of(day, 0.4)
    assert begin == 0.0 and len(stretch.requests) == 100


def test_minimum_saves_nothing_where_instances_are_warm_before_the_stretch() -> None:
    requests = [Request(f"r{number}", 2.0 * number, "t/small", 500, 50) for number in range(60)]
    day = Workload([SMALL], HOST, requests, PolicyConfig(), 120.0)
    assert simulate(day).late, "the first requests come before an instance"
    stretch = replace(day, warm_up_s=60.0, span_s=60.0)
    result = simulate(stretch)
    assert not result.late and result.summary.num_requests == len(stretch.counted) == 30
    assert result.summary.device_s == pytest.approx(stretch.arrivals_s, abs=0.1)
