"""Arrivals of open loads."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from torchrelay.cli.bench.arrivals import arrivals_of
from torchrelay.cli.bench.workload import Scenario, Workload

SERVER = Workload(Scenario.SERVER, 500.0, None, 64, 16, rate=4.0)
TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.5000000,400,10
2023-11-16 18:17:04.0000000,30,90
2023-11-16 18:17:09.5000000,7,8
"""


def test_server_has_poisson_arrivals_of_the_rate() -> None:
    times = [arrival.at for arrival in arrivals_of(SERVER)]
    assert times == sorted(times) and times[0] > 0 and times[-1] < 500
    assert 0.9 < len(times) / 2000 < 1.1
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert 0.8 < sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2 < 1.2  # of an exponential distribution: 1
    assert arrivals_of(SERVER) == arrivals_of(SERVER) != arrivals_of(replace(SERVER, seed=2))


def test_first_bound_ends_the_load() -> None:
    assert len(arrivals_of(replace(SERVER, num_requests=5))) == 5
    assert len(arrivals_of(replace(SERVER, seconds=1.0, num_requests=1000))) < 20


def test_offline_is_due_at_once() -> None:
    arrivals = arrivals_of(Workload(Scenario.OFFLINE, None, 3, 64, 16))
    assert [(each.at, each.num_prompt_tokens, each.num_output_tokens) for each in arrivals] == [(0.0, 64, 16)] * 3


def test_bursts_follow_quiet_times() -> None:
    arrivals = arrivals_of(Workload(Scenario.BURST, 11.0, None, 64, 16, at_once=2, every_s=5.0))
    assert [arrival.at for arrival in arrivals] == [5.0, 5.0, 10.0, 10.0]


def test_trace_keeps_its_times_and_its_lengths_up_to_those_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    load = Workload(Scenario.TRACE, 5.0, None, 0, 0, trace=path)
    whole = [(each.at, each.num_prompt_tokens, each.num_output_tokens) for each in arrivals_of(load)]
    assert whole == [(0.0, 400, 10), (0.5, 30, 90)]
    capped = arrivals_of(replace(load, num_prompt=64, num_answer=16))
    assert [(each.num_prompt_tokens, each.num_output_tokens) for each in capped] == [(64, 10), (30, 16)]
    path.write_text("TIMESTAMP\n")
    with pytest.raises(ValueError, match="has no column ContextTokens"):
        arrivals_of(load)
