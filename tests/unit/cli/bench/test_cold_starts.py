"""Cold requests by their explanations."""

from __future__ import annotations

import pytest

from tests.unit.cli.bench.phases import phase
from torchrelay.cli.bench.cold_starts import is_cold, phase_seconds


def test_only_a_request_that_waited_for_a_load_has_its_plan() -> None:
    assert is_cold([phase("queue", 0, 30), phase("plan", 1, 30)])
    assert not is_cold([phase("queue", 0, 1), phase("prefill", 1, 3)])
    assert not is_cold([])


def test_phase_of_several_hosts_lasts_from_the_first_to_the_last() -> None:
    phases = [phase("map", 10, 20), phase("map", 15, 40), phase("hold", 0, 5), phase("decode", 50, 0)]
    assert phase_seconds(phases) == pytest.approx({"map": 0.03, "hold": 0.005})
