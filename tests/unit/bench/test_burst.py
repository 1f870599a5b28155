"""The arrivals and figures of the burst bench."""

from __future__ import annotations

import pytest

from bench.live_scaling.arrivals import busiest, scaled, zipf_models
from bench.live_scaling.outcome import Answer, Outcome, checks_of
from torchrelay.sim.traces import Arrival

TRACE = [Arrival(0.0, 50, 5), Arrival(4.0, 60, 1), Arrival(4.5, 70, 700), Arrival(5.5, 10, 2), Arrival(9.0, 100, 3)]


def test_busiest_window_has_most_prompt_tokens_begins_at_zero_and_excludes_its_end() -> None:
    assert busiest(TRACE, 2.0) == [Arrival(0.0, 60, 1), Arrival(0.5, 70, 700), Arrival(1.5, 10, 2)]
    assert busiest(TRACE, 1.5) == [Arrival(0.0, 60, 1), Arrival(0.5, 70, 700)]


def test_scaled_keeps_times_and_cuts_long_answers() -> None:
    arrivals, factor = scaled(TRACE, 145.0, 64)
    assert factor == 0.5
    assert arrivals[2] == Arrival(4.5, 35, 64)
    assert [arrival.at for arrival in arrivals] == [arrival.at for arrival in TRACE]
    assert min(arrival.num_output_tokens for arrival in arrivals) == 1


def test_zipf_models_prefers_first_model_and_follows_seed() -> None:
    names = zipf_models(1000, ["a", "b", "c"], 1)
    assert names.count("a") > names.count("b") > names.count("c") > 0
    assert names == zipf_models(1000, ["a", "b", "c"], 1)


def test_goodput_needs_both_targets() -> None:
    good, late, slow = Answer(1.0, 0.05, 3), Answer(3.0, 0.05, 0), Answer(1.0, 0.5, 0)
    outcomes = {
        "stop": [Outcome([good, late, slow])],
        "overlap": [Outcome([late, late, slow])],
        "live": [Outcome([good, good, late])],
    }
    checks = {check.name: check.value for check in checks_of(outcomes, 2.0, 10.0)}
    assert checks["goodput_over_best_other"] == 2.0
    assert (checks["prompts_moved"], checks["layers_imported"]) == (2, 6)


def test_mean_ratio() -> None:
    outcomes = {
        name: [Outcome([Answer(ttft_s, 0.0, 0)] * 2)]
        for name, ttft_s in {"stop": 4.0, "overlap": 2.0, "live": 1.0}.items()
    }
    checks = {check.name: check.value for check in checks_of(outcomes, 9.0, 1.0)}
    assert checks["mean_over_stop"] == pytest.approx(0.25)
    assert checks["p95_over_overlap"] == pytest.approx(0.5)
