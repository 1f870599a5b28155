"""Requests of a trace, and samples, latencies and plots of a run over time."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from bench.rivals.serverlessllm import serverlessllm
from bench.simulation.plots import plot_runs, shown_until_s
from torchrelay.sim.fleets import served_model, twelve_models
from torchrelay.sim.runs import Run, run_system
from torchrelay.sim.scenario import Fleet, Request, RequestOutcome
from torchrelay.sim.setup import Knobs
from torchrelay.sim.summary import Summary
from torchrelay.sim.timeline import Sample, ttfts_over_time
from torchrelay.sim.traces import Arrival, repeated, request_stream, requests_of

SMALL = served_model("t/small", 1, 8, 32, 131072, 0.45, 15e3, 0.1)
FLEET = Fleet(1, (1, 1), 12.5e9, 25e9, 2.5e9, 480 * 10**9)


def test_percentiles_count_missing_first_tokens() -> None:
    def outcome(arrived_at: float, ttft_s: float) -> RequestOutcome:
        request = Request(str(arrived_at), 0.0, SMALL.name, 10, 10)
        return RequestOutcome(request, arrived_at, first_token_at=arrived_at + ttft_s if ttft_s else 0.0)

    ttfts = ttfts_over_time([outcome(100.0, 1.0), outcome(100.5, 3.0), outcome(112.0, 0.0)], 10.0, (50, 95))
    assert [at_s for at_s, _ in ttfts] == [5.0, 15.0]
    assert ttfts[0][1] == pytest.approx([1.0, 3.0]) and ttfts[1][1] == [math.inf, math.inf]


def test_samples_count_waiting_and_decoding_requests() -> None:
    requests = [Request(f"r{number}", 0.5 + number * 0.1, SMALL.name, 1000, 400) for number in range(10)]
    run = run_system("serverlessllm", serverlessllm, FLEET, [SMALL], Knobs(60.0, 100), requests, requests)
    # The load takes 0.6 s from RAM, so at the first whole second all arrived requests wait or just began to decode.
    assert run.samples[0].num_instances == run.samples[-1].num_instances == 1
    assert max(sample.num_waiting for sample in run.samples) >= 5
    assert max(sample.num_decoding for sample in run.samples) == 10
    assert (run.samples[-1].num_waiting, run.samples[-1].num_ready) == (0, 1)
    assert run.summary.num_requests == 10 and len(run.ttfts) >= 1


def a_run(num_waiting_at: dict[float, int]) -> Run:
    samples = [Sample(at_s, 0, 1, 0, num_waiting, 0) for at_s, num_waiting in num_waiting_at.items()]
    summary = Summary(10, 0, 1.0, 0.1, 0.2, 0.3, 0.01, 100.0, 1e9, 1)
    return Run("ours", summary, samples, [(0.5, [0.1, 0.2])])


def test_unanswered_requests_do_not_stretch_plot(tmp_path: Path) -> None:
    well = a_run({0.0: 0, 1.0: 5, 100.0: 1, 110.0: 0, 400.0: 0})
    stuck = a_run({0.0: 0, 1.0: 9, 80.0: 7, 90.0: 3, 4000.0: 3})
    assert shown_until_s([well, stuck]) == pytest.approx(105.0)
    assert shown_until_s([a_run({0.0: 0})]) == 0.0
    plot_runs(tmp_path / "runs.png", [well, stuck], "two")
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")


ARRIVALS = [Arrival(float(number), 100 + number, 10) for number in range(20)]


def test_request_stream_equals_request_list() -> None:
    models = twelve_models()
    stream = list(request_stream(ARRIVALS, models, 3.4, 1.0, seed=5))
    assert 50 < len(stream) < 90 and {request.request_id for request in stream} >= {"r0-0", "r19-2"}
    assert all(before.arrives_at <= after.arrives_at for before, after in pairwise(stream))
    listed = requests_of(ARRIVALS, models, 3.4, 1.0, seed=5)
    assert listed == sorted(listed, key=lambda request: (request.arrives_at, request.request_id))
    at_zero = {request.request_id: replace(request, arrives_at=0.0) for request in stream}
    assert {request.request_id: replace(request, arrives_at=0.0) for request in listed} == at_zero


def test_each_model_is_shifted_by_its_own_time() -> None:
    models, length_s = twelve_models()[:3], ARRIVALS[-1].at
    before = {request.request_id: request for request in request_stream(ARRIVALS, models, 20.0, 0.0, seed=5)}
    shifts = defaultdict[str, set[float]](set)
    for request in requests_of(ARRIVALS, models, 20.0, 0.0, seed=5):
        assert 0.0 <= request.arrives_at < length_s
        shifts[request.model].add(
            round((request.arrives_at - before[request.request_id].arrives_at) % length_s, 6) % length_s
        )
    assert [len(of_model) for of_model in shifts.values()] == [1, 1, 1]
    assert len(set.union(*shifts.values())) == 3, "three models, three shifts"
    again = requests_of(ARRIVALS, models, 20.0, 0.0, seed=5)
    assert again == requests_of(ARRIVALS, models, 20.0, 0.0, seed=5)
    assert again != requests_of(ARRIVALS, models, 20.0, 0.0, seed=6)


def test_requests_at_one_moment_are_not_shifted() -> None:
    (request,) = requests_of(ARRIVALS[:1], twelve_models(), 1.0, 1.0, seed=5)
    assert request.arrives_at == ARRIVALS[0].at
    assert requests_of([], twelve_models(), 1.0, 1.0, seed=5) == []


def test_repeated_trace_keeps_its_rate() -> None:
    arrivals = list(repeated(ARRIVALS, 50.0))
    assert [arrival.at for arrival in arrivals] == pytest.approx([float(number) for number in range(50)])
    assert arrivals[20].num_prompt_tokens == arrivals[40].num_prompt_tokens == ARRIVALS[0].num_prompt_tokens
    assert len(list(repeated(ARRIVALS[:1], 50.0))) == 1, "a single arrival has no rate"
