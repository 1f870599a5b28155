"""The scheduler against ServerlessLLM, BlitzScale, DistServe, AllCache and hindsight, in virtual time.

Arrivals of a trace are divided among twelve models by a Zipf law, those of each model are shifted by their own seeded
time, and the trace is scaled to half of a cluster's capacity in its mean. 60 s of warm-up do not count. All systems get
the same requests. The systems' docstrings (bench/rivals) say what of each system is modelled; the
figures of a system with several variants or settings are those of its front, the lower convex hull of its settings:
device time against the share of late requests, or against the P95 of the time to the first token, over all seeds of a
trace and a cluster. Rivals' settings are an idle timeout and a number of requests per instance, ours are what keeping
and what lateness costs. ``SETTINGS`` has those on the fronts of a wider grid.

A ratio of device times is taken at each setting of the rival, for an equal share of late requests on our front; one of
P95s at equal device time. Ratios are geometric means over these settings, and over traces and clusters.

Hindsight is a lower bound of the device time with as many late requests, per model and with the same load times;
``pooled`` is the share of requests in time if the slots of each size were one processor without loads
(bench/simulation/bounds.py).

``--size`` measures the simulator itself: the CPU time of an hour of 1,000 devices and of ten minutes of 10,000, and the
CPU time of a request by cluster size.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.report import Check, finish, parser_of, progress
from bench.simulation.bounds import hindsight_device_s, pooled_share_in_time
from bench.simulation.cases import TRACES, WARM_UP_S, Case, Outcome, cases_of, read_traces, run
from bench.simulation.fronts import Front, Point, device_ratio, geometric_mean, value_ratio
from bench.simulation.load import ZIPF
from bench.simulation.results import write_json, write_table
from bench.simulation.size import compared_interval, shortest_s, size_figures
from torchrelay.sim.setup import Knobs
from torchrelay.sim.summary import percentile
from torchrelay.sim.traces import halves

SEEDS = {"A": (1, 2), "B": (4, 5, 6)}  # by cluster
SETTINGS: Mapping[str, Sequence[Knobs]] = {
    "ours": (Knobs(late_cost_s=10.0), Knobs(late_cost_s=30.0), Knobs(late_cost_s=60.0)),
    "serverlessllm": (Knobs(2.0, 4), Knobs(10.0, 4)),
    "blitzscale_min0": (Knobs(2.0, 4), Knobs(10.0, 4)),
    "blitzscale_min1": (Knobs(10.0, 4),),
    "distserve_mean": (Knobs(10.0, 8),),
    "distserve_peak": (Knobs(10.0, 8),),
    "all_cache": (Knobs(10.0, 4),),
}
RIVALS = {
    "serverlessllm": ("serverlessllm",),
    "blitz": ("blitzscale_min0", "blitzscale_min1"),
    "distserve": ("distserve_mean", "distserve_peak"),
    "allcache": ("all_cache",),
}
DEVICE_BOUNDS = {"serverlessllm": 0.72, "blitz": 0.77, "distserve": 0.72}
P95_BOUNDS = {"serverlessllm": 0.5, "allcache": 0.9}
WORST_BOUND = 1.02
HINDSIGHT_BOUND = 1.3
POOLED_BOUND = 0.9
POOLED_TRACE = "code"  # whose bursts exceed the cluster


@dataclass(frozen=True)
class Group:
    """Outcomes of all seeds of a trace on a cluster, by system and setting."""

    name: str
    cases: Sequence[Case]
    outcomes: Mapping[tuple[str, Knobs], Sequence[Outcome]]

    def late_front(self, systems: Sequence[str]) -> Front:
        """Device seconds by the share of late requests."""
        return Front(
            Point(_device_s(outcomes), late_share(outcomes))
            for (system, _), outcomes in self.outcomes.items()
            if system in systems
        )

    def p95_front(self, systems: Sequence[str]) -> Front:
        """Device seconds by the P95 of the time to the first token."""
        return Front(
            Point(_device_s(outcomes), p95_s(outcomes))
            for (system, _), outcomes in self.outcomes.items()
            if system in systems
        )

    def over_hindsight(self) -> float:
        """Device time over the bound in hindsight, in the mean of our settings on the front."""
        front = {point.device_s for point in self.late_front(["ours"]).points}
        ratios = []
        for (system, _), outcomes in self.outcomes.items():
            if system == "ours" and _device_s(outcomes) in front:
                pairs = zip(self.cases, outcomes, strict=True)
                bound_s = sum(hindsight_device_s(case, each.num_late, each.num_open) for case, each in pairs)
                ratios.append(_device_s(outcomes) / bound_s)
        return geometric_mean(ratios)

    def in_time_over_pooled(self) -> float:
        """Our best share of requests in time over that of pooled slots."""
        numbers = [len(case.counted) for case in self.cases]
        pooled = sum(pooled_share_in_time(case) * number for case, number in zip(self.cases, numbers, strict=True))
        return (1 - self.late_front(["ours"]).least_value) / (pooled / sum(numbers))


def _device_s(outcomes: Sequence[Outcome]) -> float:
    return sum(outcome.device_s for outcome in outcomes)


def late_share(outcomes: Sequence[Outcome]) -> float:
    return sum(outcome.num_late for outcome in outcomes) / sum(outcome.num_requests for outcome in outcomes)


def p95_s(outcomes: Sequence[Outcome]) -> float:
    return percentile((ttft_s for outcome in outcomes for ttft_s in outcome.ttfts_s), 95)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, "20 s of each trace on cluster B with one seed")
    parser.add_argument("--traces", type=Path, default=TRACES, help="a folder of CSV files (%(default)s)")
    parser.add_argument(
        "--devices", type=int, nargs="+", default=(), help="with --size: only clusters with these numbers of devices"
    )
    parser.add_argument(
        "--seconds", type=float, help="that count, of each case (60; quick: 20); with --size: the longest run"
    )
    parser.add_argument("--out", type=Path, help="a folder for the table of all outcomes")
    parser.add_argument("--size", action="store_true", help="measure the cost of simulating large clusters instead")
    return parser.parse_args()


def measure(options: argparse.Namespace, seconds: float) -> list[Group]:
    """Runs all settings of all systems on all cases."""
    seeds = {"B": (1,)} if options.quick else SEEDS
    cases = cases_of(options.traces, seeds, seconds)
    by_group = defaultdict[tuple[str, str], list[Case]](list)
    for case in cases:
        by_group[case.group].append(case)
    settings = [(system, knobs) for system, all_knobs in SETTINGS.items() for knobs in all_knobs]
    groups = []
    with ProcessPoolExecutor() as pool:
        futures = {
            (case.group, case.seed, setting): pool.submit(run, case, *setting) for case in cases for setting in settings
        }
        for group, own in by_group.items():
            outcomes = {setting: [futures[group, case.seed, setting].result() for case in own] for setting in settings}
            groups.append(Group(" on ".join(group), own, outcomes))
            show(groups[-1])
    return groups


def show(group: Group) -> None:
    progress(f"{group.name}: {sum(len(case.counted) for case in group.cases)} requests that count")
    for (system, knobs), outcomes in group.outcomes.items():
        detail = f"late {knobs.late_cost_s:g} s" if system == "ours" else f"{knobs.requests_per_instance} each"
        progress(
            f"  {system:<16} {knobs.idle_timeout_s:>5g} s, {detail:>8}: late {late_share(outcomes):.3f}, "
            f"P95 {p95_s(outcomes):7.2f} s, {_device_s(outcomes):6.0f} device s"
        )


def checks_of(groups: Sequence[Group]) -> list[Check]:
    checks, worst = [], []
    for rival, bound in DEVICE_BOUNDS.items():
        ratios = {
            group.name: device_ratio(group.late_front(["ours"]), group.late_front(RIVALS[rival])) for group in groups
        }
        worst += [(ratio, f"{rival}, {name}") for name, ratio in ratios.items()]
        checks.append(_mean(f"device_over_{rival}", ratios, bound))
    checks.append(Check("device_over_worst", *_bounded(max(worst))))
    for rival, bound in P95_BOUNDS.items():
        ratios = {
            group.name: value_ratio(group.p95_front(["ours"]), group.p95_front(RIVALS[rival])) for group in groups
        }
        checks.append(_mean(f"p95_over_{rival}", ratios, bound))
    ratios = {group.name: group.over_hindsight() for group in groups}
    checks.append(_mean("device_over_hindsight", ratios, HINDSIGHT_BOUND))
    pooled = {group.name: group.in_time_over_pooled() for group in groups if group.name.startswith(POOLED_TRACE)}
    if pooled:
        name = min(pooled, key=pooled.__getitem__)
        text = "; ".join(f"{name} {ratio:.3f}" for name, ratio in pooled.items())
        checks.append(Check("in_time_over_pooled", pooled[name], "", POOLED_BOUND, text, at_least=True))
    return checks


def _bounded(worst: tuple[float, str]) -> tuple[float, str, float, str]:
    return worst[0], "", WORST_BOUND, worst[1]


def _mean(name: str, ratios: Mapping[str, float], bound: float) -> Check:
    text = "; ".join(f"{group} {ratio:.3f}" for group, ratio in ratios.items())
    return Check(name, geometric_mean(ratios.values()), "", bound, text)


def main() -> None:
    options = arguments()
    if options.size:
        name, arrivals = next(reversed(read_traces(options.traces).items()))
        conditions = {
            "quick": options.quick,
            "seconds": options.seconds,
            "trace": name,
            "cost_of_requests_that_came_between_s": compared_interval(
                shortest_s(options.seconds, is_quick=options.quick)
            ),
        }
        figures = size_figures(
            halves(arrivals)[0],
            is_quick=options.quick,
            num_devices=options.devices,
            most_seconds=options.seconds,
            out=options.out,
        )
        finish("simulate_size", conditions, figures)
    seconds = options.seconds or (20.0 if options.quick else 60.0)
    groups = measure(options, seconds)
    if options.out:
        rows = [
            {"group": group.name, "system": system, **asdict(knobs), "device_s": _device_s(outcomes)}
            | {"late_share": late_share(outcomes), "p95_s": p95_s(outcomes)}
            for group in groups
            for (system, knobs), outcomes in group.outcomes.items()
        ]
        write_table(options.out / "simulate.csv", rows)
        write_json(options.out / "simulate.json", {"zipf": ZIPF, "rows": rows})
    conditions = {"quick": options.quick, "seconds": seconds, "warm_up_s": WARM_UP_S}
    conditions["cases"] = [f"{group.name}, seeds {[case.seed for case in group.cases]}" for group in groups]
    finish("simulate", conditions, checks_of(groups))


if __name__ == "__main__":
    main()
