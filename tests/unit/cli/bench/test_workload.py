"""Bounds of a load, and its description."""

from __future__ import annotations

from torchrelay.cli.bench.workload import Scenario, Workload, bounds_of


def test_every_scenario_is_bounded() -> None:
    assert all(bounds_of(scenario, None, None) != (None, None) for scenario in Scenario)
    assert bounds_of(Scenario.OFFLINE, None, None) == (None, 100)
    assert bounds_of(Scenario.SERVER, None, None) == (60.0, None)
    assert bounds_of(Scenario.SERVER, None, 7) == (None, 7)
    assert bounds_of(Scenario.COLD, 5.0, None) == (5.0, None)


def test_words_name_rhythm_bounds_and_lengths() -> None:
    load = Workload(Scenario.BURST, 60.0, 1, 512, 128, at_once=4, every_s=5.0, num_shared=32)
    assert load.words == (
        "burst: 4 at once every 5 s, 1 request or 60 s; prompts of 512, answers of 128 tokens (32 shared)"
    )
