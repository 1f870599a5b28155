"""Whether the scheduler's policy of one commit costs more than that of another, with the same requests.

    python bench/compare.py OLD NEW [--quick] [--traces FOLDER]

Each commit runs in processes of its own, with its own simulator; ``.`` is the repository as it is, with what is not
committed. J = device seconds + 60 x late requests; dJ is the mean, over cases of bench/simulate.py, of the relative
change of J, with the 95% interval of the paired differences. A scenario's ratio is that of its mean figures over three
seeds; less is better. Two runs of the same code give no difference at all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import zlib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.commits import checkout, git, start_module
from bench.report import Check, finish, parser_of, progress
from bench.simulation.cases import TRACES, cases_of
from bench.simulation.paired import Changes, cost_of
from bench.simulation.scenarios import SCENARIOS
from torchrelay.scheduler.policy.strategies import Strategies
from torchrelay.sim.scenario import Request

MEAN_BOUND, HIGH_BOUND = 0.01, 0.03  # of dJ: its mean, and the upper end of its interval
SCENARIO_BOUND = 1.05
SECONDS, QUICK_SECONDS = 30.0, 10.0  # of each case that count
SEEDS, QUICK_SEEDS = {"A": (1, 2, 3), "B": (4, 5, 6)}, {"B": (4,)}  # by cluster
SCENARIO_SEEDS = (1, 2, 3)
QUICK_SCENARIOS = ("flapping", "ebb", "long_answers", "contended_loads", "loads_at_once", "beside_idle", "roles_apart")


@dataclass(frozen=True)
class Run:
    """J of a case, or the figure of a scenario. ``digest``: of its requests."""

    name: str
    digest: int
    cost: float


def digest_of(requests: Sequence[Request]) -> int:
    """Equal for the same requests in every process."""
    fields = [
        (request.request_id, request.arrives_at, request.model, request.num_prompt_tokens, request.num_output_tokens)
        for request in requests
    ]
    return zlib.crc32(repr(fields).encode())


def run_scenario(name: str, seed: int) -> Run:
    scenario = SCENARIOS[name](seed)
    return Run(name, digest_of(scenario.requests), scenario.run(Strategies()))


def measure(traces: Path, *, is_quick: bool) -> None:
    """Runs everything with the present code; prints JSON: the runs of cases, then those of scenarios."""
    seconds, seeds = (QUICK_SECONDS, QUICK_SEEDS) if is_quick else (SECONDS, SEEDS)
    cases = cases_of(traces, seeds, seconds)
    scenario_seeds = SCENARIO_SEEDS[:1] if is_quick else SCENARIO_SEEDS
    names = QUICK_SCENARIOS if is_quick else SCENARIOS
    with ProcessPoolExecutor(max((os.cpu_count() or 1) // 2, 1)) as pool:  # the other commit runs at the same time
        costs = [pool.submit(cost_of, case, Strategies()) for case in cases]
        scenarios = [pool.submit(run_scenario, name, seed) for name in names for seed in scenario_seeds]
        of_cases = [
            Run(case.name, digest_of(case.requests), cost.result()) for case, cost in zip(cases, costs, strict=True)
        ]
        of_scenarios = [future.result() for future in scenarios]
    print(json.dumps([[vars(run) for run in runs] for runs in (of_cases, of_scenarios)]))


def runs_of(process: subprocess.Popen[str]) -> tuple[list[Run], dict[str, list[Run]]]:
    """Runs of cases, and those of scenarios by name, of a process that measures."""
    output, _ = process.communicate()
    if process.returncode:
        sys.exit(f"compare: a commit's runs ended with status {process.returncode}")
    of_cases, of_scenarios = ([Run(**each) for each in part] for part in json.loads(output.splitlines()[-1]))
    names = dict.fromkeys(run.name for run in of_scenarios)
    return of_cases, {name: [run for run in of_scenarios if run.name == name] for name in names}


def check_same_requests(old: Sequence[Run], new: Sequence[Run]) -> None:
    if (requests := [(run.name, run.digest) for run in old]) != [(run.name, run.digest) for run in new]:
        sys.exit(f"compare: the commits run other requests in {', '.join(dict.fromkeys(name for name, _ in requests))}")


def checks_of(old: tuple[list[Run], dict[str, list[Run]]], new: tuple[list[Run], dict[str, list[Run]]]) -> list[Check]:
    """Raises ``SystemExit`` if the commits did not run the same requests."""
    check_same_requests(old[0], new[0])
    changes = Changes.between(*([run.cost for run in runs] for runs, _ in (old, new)))
    by_case = zip(old[0], new[0], changes.values, strict=True)
    for before, after, change in by_case:
        progress(f"{before.name}: J {before.cost:.0f} -> {after.cost:.0f}, {change:+.1%}")
    text = f"{changes}, {len(changes.values)} cases"
    checks = [
        Check("dj_mean", changes.mean, "", MEAN_BOUND, text),
        Check("dj_high", changes.mean + changes.half_width, "", HIGH_BOUND, "upper end of the 95% interval"),
    ]
    for name in (name for name in old[1] if name in new[1]):
        check_same_requests(old[1][name], new[1][name])
        means = [statistics.mean(run.cost for run in runs[name]) for _, runs in (old, new)]
        text = f"{means[0]:.4g} -> {means[1]:.4g}, {len(new[1][name])} seeds"
        checks.append(Check(f"scenario_{name}", means[1] / means[0], "", SCENARIO_BOUND, text))
    return checks


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
        old, new = (runs_of(process) for process in processes)
    conditions = {"quick": options.quick, "late_s": 60, "commits": [*map(git_name, options.commits)]}
    finish("compare", conditions, checks_of(old, new))


def git_name(commit: str) -> str:
    return commit if commit == "." else git("rev-parse", "--short", commit)


if __name__ == "__main__":
    main()
