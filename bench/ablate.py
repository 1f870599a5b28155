"""Measures what a rule of the scheduler's policy earns: the same requests with the rule and without it.

J = device seconds + 60 x late requests, the default price (`idle_timeout_s`). dJ is the mean, over cases, of the
relative change of J without the rule, with the 95% interval of the paired differences: above 0, the rule earns. The
cases are those of bench/simulate.py, the scenarios those of bench/simulation/scenarios.py. A rule stays if its interval
excludes 0 and dJ is at least 1%, or if a scenario's figure is at least 5% worse without it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.report import Check, finish, parser_of, progress
from bench.simulation.cases import TRACES, Case, cases_of
from bench.simulation.paired import Changes, cost_of
from bench.simulation.rules import RULES, without
from bench.simulation.scenarios import SCENARIOS

SECONDS = 30.0  # of each case that count
SEEDS = {"A": (1,), "B": (4, 5)}  # by cluster
LEAST = 0.01  # of J
SCENARIO_SEED = 1
SCENARIO_LEAST = 0.05  # of a scenario's figure


@dataclass(frozen=True)
class Effect:
    """The effect of leaving a rule out: relative changes, of J by case and of each scenario's figure."""

    rule: str
    changes: Changes
    scenarios: dict[str, float]

    @property
    def needed_by(self) -> list[str]:
        """Scenarios that are worse without the rule."""
        return [name for name, change in self.scenarios.items() if change >= SCENARIO_LEAST]

    @property
    def earns(self) -> bool:
        is_clear = self.changes.mean - self.changes.half_width > 0
        return (is_clear and self.changes.mean >= LEAST) or bool(self.needed_by)

    def __str__(self) -> str:
        scenarios = ", ".join(
            f"{name} {change:+.0%}" for name, change in self.scenarios.items() if abs(change) >= SCENARIO_LEAST
        )
        verdict = "stays" if self.earns else "goes "
        return f"{verdict} {self.rule:<20} {self.changes}  {scenarios}"


def cost_without(rule: str, case: Case) -> float:
    """J of the case without the rule."""
    with without(rule) as strategies:
        return cost_of(case, strategies)


def figure_of(name: str, seed: int, rule: str) -> float:
    with without(rule) as strategies:
        return SCENARIOS[name](seed).run(strategies)


def effects_of(rules: Sequence[str], cases: Sequence[Case], pool: ProcessPoolExecutor) -> list[Effect]:
    """Effects of leaving each rule out, all against the same runs with every rule."""
    everything = ["", *rules]
    costs = {rule: [pool.submit(cost_without, rule, case) for case in cases] for rule in everything}
    figures = {
        rule: {name: pool.submit(figure_of, name, SCENARIO_SEED, rule) for name in SCENARIOS} for rule in everything
    }
    before = [future.result() for future in costs[""]]
    figures_before = {name: future.result() for name, future in figures[""].items()}
    progress("with every rule: " + ", ".join(f"{name} {figure:.3g}" for name, figure in figures_before.items()))
    effects = []
    for rule in rules:
        changes = Changes.between(before, [future.result() for future in costs[rule]])
        scenarios = {name: future.result() / figures_before[name] - 1 for name, future in figures[rule].items()}
        effects.append(Effect(rule, changes, scenarios))
        progress(str(effects[-1]))
    return effects


def main() -> None:
    parser = parser_of(__doc__, "10 s of each trace on cluster B with one seed")
    parser.add_argument("--without", nargs="+", metavar="RULE", choices=RULES, help=f"one of {', '.join(RULES)}")
    parser.add_argument("--traces", type=Path, default=TRACES, help="a folder of CSV files (%(default)s)")
    options = parser.parse_args()
    seconds, seeds = (10.0, {"B": (4,)}) if options.quick else (SECONDS, SEEDS)
    cases = cases_of(options.traces, seeds, seconds)
    rules = options.without or ["end_time_slice"]
    with ProcessPoolExecutor() as pool:
        effects = effects_of(rules, cases, pool)
    checks = [
        Check(f"dj_{effect.rule}", effect.changes.mean, "", LEAST, str(effect), at_least=True) for effect in effects
    ]
    finish("ablate", {"quick": options.quick, "seconds": seconds, "num_cases": len(cases)}, checks)


if __name__ == "__main__":
    main()
