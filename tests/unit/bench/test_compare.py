"""Verdicts on two commits' costs, and the code that each commit runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.commits import REPO, checkout, start_module
from bench.compare import Run, checks_of, half_width

CASES = [Run("code on A, seed 1", True, 1, 100.0), Run("code on A, seed 2", True, 2, 400.0)]
EBB = [Run("ebb", False, 3, 8.0), Run("ebb", False, 4, 12.0)]


def changed(runs: list[Run], *factors: float) -> list[Run]:
    return [replace(run, cost=run.cost * factor) for run, factor in zip(runs, factors, strict=True)]


def test_equal_costs_meet_all_bounds() -> None:
    checks = checks_of([*CASES, *EBB], [*CASES, *EBB])
    assert [(check.name, check.value) for check in checks] == [("dj_mean", 0), ("dj_high", 0), ("scenario_ebb", 1)]
    assert all(check.ok for check in checks)


def test_changes_count_by_case_and_in_the_mean_of_a_scenario() -> None:
    new = [*changed(CASES, 1.02, 0.98), *changed(EBB, 1.2, 1.0), Run("new", False, 5, 1.0)]
    mean, high, scenario = checks_of([*CASES, *EBB], new)
    assert mean.value == pytest.approx(0.0) and mean.ok
    assert high.value == pytest.approx(12.71 * 0.02) and not high.ok, "the interval of two cases is wide"
    assert scenario.value == pytest.approx(1.08) and not scenario.ok


def test_other_requests_are_no_comparison() -> None:
    with pytest.raises(SystemExit, match="other requests in code on A, seed 2"):
        checks_of(CASES, [CASES[0], replace(CASES[1], digest=9)])


def test_interval_needs_two_cases() -> None:
    assert half_width([0.01]) == float("inf") and half_width([0.1, 0.1]) == 0.0


def test_commit_runs_its_own_packages() -> None:
    with checkout("HEAD") as tree:
        output, _ = start_module(tree, "site").communicate()
        names = [name for name in (str(tree / "sim" / "src"), str(REPO / "sim" / "src")) if name in output]
        assert names[0] == str(tree / "sim" / "src") and (tree / "bench" / "report.py").exists()
        assert len(names) == 1 or output.index(names[0]) < output.index(names[1])
    assert not tree.exists()
