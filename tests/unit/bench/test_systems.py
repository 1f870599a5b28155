"""Compared systems: each does what its docstring says, on the same cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.rivals.distserve import StaticInstances, fitting
from bench.rivals.relay_plans import by_chain, from_disk
from bench.rivals.systems import SYSTEMS
from torchrelay.scheduler.policy.types import REMOTE
from torchrelay.sim.fleets import served_model
from torchrelay.sim.plant import Plant
from torchrelay.sim.scenario import Fleet, Request, RequestOutcome
from torchrelay.sim.setup import Knobs, one_copy_each
from torchrelay.sim.summary import summarize

FIRST = served_model("t/first", 1, 8, 32, 131072, 0.45, 15e3, 0.1)
SECOND = served_model("t/second", 1, 8, 32, 131072, 0.45, 15e3, 0.1)
FLEET = Fleet(2, (1, 1), 12.5e9, 25e9, 2.5e9, 480 * 10**9)
COPY_S = FIRST.pack_bytes / FLEET.device_bytes_per_s
KNOBS = Knobs(idle_timeout_s=5.0, requests_per_instance=8)


def requests(model: str, number: int, every_s: float) -> list[Request]:
    return [Request(f"{model} {n}", n * every_s, model, 1000, 20) for n in range(number)]


def run(system: str, requests: list[Request]) -> tuple[Plant, list[RequestOutcome]]:
    plant = SYSTEMS[system](FLEET, [FIRST, SECOND], KNOBS, requests).plant([FIRST, SECOND])
    return plant, plant.run(sorted(requests, key=lambda request: request.arrives_at), settle_s=10.0)


def devices_held(plant: Plant, after_s: float) -> int:
    plant.events.run(plant.events.now + after_s)
    return sum(worker.num_devices for worker in plant.workers.values() if worker.slot.instance_id)


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_request_answered_deterministically(system: str) -> None:
    both = requests("t/first", 30, 0.1) + requests("t/second", 10, 0.3)
    (plant, outcomes), (_, again) = run(system, both), run(system, both)
    summary = summarize(outcomes, plant.served, plant.at_last_arrival)
    assert summary.num_requests == 40 and not summary.num_refused and summary.device_s > 0
    assert all(outcome.ended_at for outcome in outcomes)
    assert [outcome.ended_at for outcome in again] == [outcome.ended_at for outcome in outcomes]


@pytest.mark.parametrize(("system", "held"), [("serverlessllm", 0), ("blitzscale_min0", 0), ("blitzscale_min1", 2)])
def test_devices_held_without_requests(system: str, held: int) -> None:
    plant, _ = run(system, requests("t/first", 3, 0.1))
    assert devices_held(plant, 20.0) == held


def test_keep_alive_time_saves_second_load() -> None:
    twice = [Request("a", 0.0, "t/first", 1000, 20), Request("b", 4.0, "t/first", 1000, 20)]
    later = [twice[0], Request("b", 20.0, "t/first", 1000, 20)]
    kept, loaded_again = run("serverlessllm", twice)[0], run("serverlessllm", later)[0]
    assert kept.spent_now().num_loads == 1 and loaded_again.spent_now().num_loads == 2


def test_all_cache_load_takes_device_copy() -> None:
    _, (first,) = run("all_cache", requests("t/first", 1, 1.0))
    assert COPY_S < first.ttft_s < COPY_S + 0.2


@pytest.mark.parametrize("system", ["distserve_mean", "distserve_peak"])
def test_static_instances_present_from_start(system: str) -> None:
    plant, outcomes = run(system, requests("t/first", 3, 0.1))
    assert all(outcome.ttft_s < 0.3 for outcome in outcomes), "no load"
    assert plant.at_last_arrival.num_loads == 0
    assert devices_held(plant, 60.0) == 4, "prefill and decode of both models"


def test_static_instances_fit_by_requests_per_slot() -> None:
    four, three = Fleet(1, (1, 1, 1, 1), 1e9, 1e9, 1e9, 10**9), Fleet(1, (1, 1, 1), 1e9, 1e9, 1e9, 10**9)
    num_requests = {"t/first": 10, "t/second": 30}
    assert fitting(four, {FIRST: (1, 1), SECOND: (1, 1)}, num_requests) == {FIRST: (1, 1), SECOND: (1, 1)}
    assert fitting(three, {FIRST: (1, 1), SECOND: (1, 1)}, num_requests) == {SECOND: (1, 1)}
    assert fitting(four, {FIRST: (1, 1), SECOND: (6, 3)}, num_requests) == {FIRST: (1, 1), SECOND: (1, 1)}
    assert fitting(four, {FIRST: (1, 1), SECOND: (6, 3)}, {"t/second": 30}) == {SECOND: (3, 1)}


def test_model_without_static_instances_not_served() -> None:
    both = requests("t/first", 3, 0.1) + requests("t/second", 4, 0.1)
    small = replace(FLEET, num_hosts=1)
    setup = SYSTEMS["distserve_mean"](small, [FIRST, SECOND], KNOBS, both)
    assert setup.fleet.num_devices == small.num_devices
    assert isinstance(setup.strategies.decide, StaticInstances)
    assert [(model.name, *numbers) for model, *numbers in setup.strategies.decide.numbers] == [("t/second", 1, 1)]


def test_relay_plans_of_rivals() -> None:
    chain = by_chain(["s0"], [], ["s1", "s2", "s0"])
    assert [(edge.target, edge.upstream) for edge in chain] == [("s1", "s0"), ("s2", "s1"), ("s0", "s2")]
    assert [edge.already_there for edge in chain] == [False, False, True]
    assert {edge.upstream for edge in from_disk(["s0"], [], ["s1", "s2"])} == {REMOTE}


def test_each_fitting_pack_has_one_copy() -> None:
    assert one_copy_each(FLEET, [FIRST, SECOND]) == {0: ["t/first"], 1: ["t/second"]}
    assert one_copy_each(Fleet(1, (1,), 1.0, 1.0, 1.0, FIRST.pack_bytes), [FIRST, SECOND]) == {0: ["t/first"]}
