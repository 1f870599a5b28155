"""Verdicts on two commits' costs, and the code that each commit runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.commits import REPO, checkout, start_module
from bench.compare import Run, checks_of
from bench.simulation.paired import Changes

CASES = [Run("code on A, seed 1", 1, 100.0), Run("code on A, seed 2", 2, 400.0)]
SCENARIOS = {"ebb": [Run("ebb", 3, 8.0), Run("ebb", 4, 12.0)]}


def changed(*factors: float) -> list[Run]:
    return [replace(run, cost=run.cost * factor) for run, factor in zip(CASES, factors, strict=True)]


def test_equal_costs_meet_all_bounds() -> None:
    checks = checks_of((CASES, SCENARIOS), (CASES, SCENARIOS))
    assert [(check.name, check.value, check.ok) for check in checks] == [
        ("dj_mean", 0.0, True),
        ("dj_high", 0.0, True),
        ("scenario_ebb", 1.0, True),
    ]


def test_changes_count_by_case_and_in_the_mean_of_a_scenario() -> None:
    worse = {"ebb": [Run("ebb", 3, 9.0), Run("ebb", 4, 12.6)], "new": [Run("new", 5, 1.0)]}
    mean, high, scenario = checks_of((CASES, SCENARIOS), (changed(1.02, 0.98), worse))
    assert mean.value == pytest.approx(0.0) and mean.ok
    assert high.value == pytest.approx(12.71 * 0.02) and not high.ok, "the interval of two cases is wide"
    assert scenario.value == pytest.approx(1.08) and not scenario.ok


def test_other_requests_are_no_comparison() -> None:
    with pytest.raises(SystemExit, match="other requests"):
        checks_of((CASES, SCENARIOS), ([replace(CASES[0], digest=9), CASES[1]], SCENARIOS))


def test_interval_needs_two_cases() -> None:
    assert Changes([0.01]).half_width == float("inf")
    assert Changes.between([1.0, 2.0], [1.1, 2.2]).half_width == pytest.approx(0.0)


def test_commit_runs_its_own_packages() -> None:
    with checkout("HEAD") as tree:
        output, _ = start_module(tree, "site").communicate()
        names = [name for name in (str(tree / "sim" / "src"), str(REPO / "sim" / "src")) if name in output]
        assert names[0] == str(tree / "sim" / "src") and (tree / "bench" / "report.py").exists()
        assert len(names) == 1 or output.index(names[0]) < output.index(names[1])
    assert not tree.exists()
