"""Plots of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrelay.sim.plots import plot_runs, shown_until_s
from torchrelay.sim.policies.runs import Run
from torchrelay.sim.summary import Summary
from torchrelay.sim.timeline import Sample


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
