"""Whether the scheduler's policy of one commit costs more than that of another, with the same requests.

    python bench/compare.py OLD NEW [--quick]

Each commit runs in processes of its own, with its own simulator; ``.`` is the repository as it is, with what is not
committed. To measure what a rule earns, compare with a commit that lacks it.

J = device seconds + 60 x late requests; 60 is the default of ``late_cost_s``. dJ is the mean, over cases of
bench/simulate.py, of the relative change of J, with the 95% interval of the paired differences. A scenario's figure
(bench/simulation/scenarios.py) is the mean of three seeds; less is better. The same code has no difference at all.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import zlib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.commits import HERE, checkout, git, start_module
from bench.report import Check, finish, parser_of, progress
from bench.simulation.cases import TRACES, Case, cases_of, run
from bench.simulation.scenarios import SCENARIOS
from torchrelay.scheduler.policy.strategies import Strategies
from torchrelay.sim.scenario import Request
from torchrelay.sim.setup import Knobs

LATE_S = 60.0
MEAN_BOUND, HIGH_BOUND, SCENARIO_BOUND = 0.01, 0.03, 1.05  # of dJ, of the upper end of its interval, of ratios
SECONDS, SEEDS, SCENARIO_SEEDS = 30.0, {"A": (1, 2, 3), "B": (4, 5, 6)}, (1, 2, 3)
QUICK_SECONDS, QUICK_SEEDS = 10.0, {"B": (4,)}
QUICK_SCENARIOS = ("flapping", "ebb", "long_answers", "contended_loads", "loads_at_once", "beside_idle", "roles_apart")
# Two-sided 95% quantiles of Student's t, by degrees of freedom.
T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 11: 2.20, 15: 2.13, 19: 2.09}


@dataclass(frozen=True)
class Run:
    """J of a case, or the figure of a scenario. ``digest``: of its requests."""

    name: str
    is_case: bool
    digest: int
    cost: float


def digest_of(requests: Sequence[Request]) -> int:
    """Equal for the same requests in every process and commit."""
    fields = ("request_id", "arrives_at", "model", "num_prompt_tokens", "num_output_tokens")
    return zlib.crc32(repr([[getattr(each, name) for name in fields] for each in requests]).encode())


def run_case(case: Case) -> Run:
    outcome = run(case, "ours", Knobs(late_cost_s=LATE_S))
    name = f"{case.trace} on {case.fleet}, seed {case.seed}"
    return Run(name, True, digest_of(case.requests), outcome.device_s + LATE_S * outcome.num_late)


def run_scenario(name: str, seed: int) -> Run:
    scenario = SCENARIOS[name](seed)
    return Run(name, False, digest_of(scenario.requests), scenario.run(Strategies()))


def measure(traces: Path, *, is_quick: bool) -> None:
    """Runs cases and scenarios with the present code, and prints all runs as JSON."""
    cases = cases_of(traces, QUICK_SEEDS if is_quick else SEEDS, QUICK_SECONDS if is_quick else SECONDS)
    names, seeds = (QUICK_SCENARIOS, SCENARIO_SEEDS[:1]) if is_quick else (tuple(SCENARIOS), SCENARIO_SEEDS)
    with ProcessPoolExecutor(max((os.cpu_count() or 1) // 2, 1)) as pool:  # the other commit runs at the same time
        futures = [pool.submit(run_case, case) for case in cases]
        futures += [pool.submit(run_scenario, name, seed) for name in names for seed in seeds]
        print(json.dumps([vars(future.result()) for future in futures]))


def runs_of(process: subprocess.Popen[str]) -> list[Run]:
    """The runs that the process prints."""
    output, _ = process.communicate()
    if process.returncode:
        sys.exit(f"compare: the runs of a commit ended with status {process.returncode}")
    return [Run(**each) for each in json.loads(output.splitlines()[-1])]


def half_width(changes: Sequence[float]) -> float:
    """Half of the 95% interval of their mean."""
    if len(changes) < 2:
        return math.inf
    quantile = T95[max(freedom for freedom in T95 if freedom < len(changes))]
    return quantile * statistics.stdev(changes) / math.sqrt(len(changes))


def checks_of(old: Sequence[Run], new: Sequence[Run]) -> list[Check]:
    """Raises ``SystemExit`` if a case or scenario of both commits has other requests. A scenario that only one of them
    has does not count.
    """
    names = {run.name for run in old} & {run.name for run in new}
    pairs = list(zip(*([run for run in runs if run.name in names] for runs in (old, new)), strict=True))
    if differing := [was.name for was, is_ in pairs if (was.name, was.digest) != (is_.name, is_.digest)]:
        sys.exit(f"compare: the commits have other requests in {', '.join(dict.fromkeys(differing))}")
    changes, checks = [], list[Check]()
    for (name, is_case), group in groupby(pairs, lambda pair: (pair[0].name, pair[0].is_case)):
        before, after = (statistics.mean(run.cost for run in runs) for runs in zip(*group, strict=True))
        if is_case:
            changes.append(after / before - 1)
            progress(f"{name}: J {before:.0f} -> {after:.0f}, {changes[-1]:+.1%}")
        else:
            text = f"{before:.4g} -> {after:.4g}"
            checks.append(Check(f"scenario_{name}", after / before, "", SCENARIO_BOUND, text))
    mean, half = statistics.mean(changes), half_width(changes)
    text = f"{mean:+.2%} +- {half:.2%}, {len(changes)} cases"
    return [
        Check("dj_mean", mean, "", MEAN_BOUND, text),
        Check("dj_high", mean + half, "", HIGH_BOUND, "upper end of the 95% interval"),
        *checks,
    ]


def main() -> None:
    parser = parser_of(__doc__, "two cases of 10 s and the shortest scenarios, with one seed; under 50 s")
    parser.add_argument("commits", nargs="*", metavar="OLD NEW")
    parser.add_argument("--traces", type=Path, default=TRACES, help="a folder of CSV files (%(default)s)")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.traces, is_quick=options.quick)
        return
    if len(options.commits) != 2:
        parser.error("name two commits: OLD NEW")
    arguments = ["--measure", "--traces", options.traces, *(["--quick"] if options.quick else [])]
    with ExitStack() as stack:
        trees = [stack.enter_context(checkout(commit)) for commit in options.commits]
        processes = [start_module(tree, "bench.compare", *arguments) for tree in trees]
        old, new = map(runs_of, processes)
    names = [commit if commit == HERE else git("rev-parse", "--short", commit) for commit in options.commits]
    finish("compare", {"quick": options.quick, "commits": names}, checks_of(old, new))


if __name__ == "__main__":
    main()
