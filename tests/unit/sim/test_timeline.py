"""Samples and latencies of a run over time."""

from __future__ import annotations

import math

import pytest

from torchrelay.sim.fleets import served_model
from torchrelay.sim.policies.runs import run_system
from torchrelay.sim.policies.setup import Knobs
from torchrelay.sim.scenario import Fleet, Request, RequestOutcome
from torchrelay.sim.timeline import ttfts_over_time

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
    run = run_system("serverlessllm", FLEET, [SMALL], Knobs(60.0, 100), requests, requests)
    # The load takes 0.6 s from RAM, so at the first whole second all arrived requests wait or just began to decode.
    assert run.samples[0].num_instances == run.samples[-1].num_instances == 1
    assert max(sample.num_waiting for sample in run.samples) >= 5
    assert max(sample.num_decoding for sample in run.samples) == 10
    assert (run.samples[-1].num_waiting, run.samples[-1].num_ready) == (0, 1)
    assert run.summary.num_requests == 10 and len(run.ttfts) >= 1
