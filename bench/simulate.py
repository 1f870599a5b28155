"""The scheduler against ServerlessLLM, BlitzScale, DistServe, AllCache and a clairvoyant system, in virtual time.

Each half of a trace is scaled to half of the cluster's capacity, and its arrivals are divided among twelve models by a
Zipf law. Every system is tuned with the same grid on one half and scored on the other. The points of the grid differ in
idle timeout, which for our scheduler is a price in seconds of one device. The systems' docstrings
(sim/src/torchrelay/sim/policies) say what of each system is modelled.

Device time is compared at equal attainment: each system's cheapest setting that, on the tuning half, attains 99% of the
lower of the two best attainments. If ours attains less than 99% of the rival's on the scored half, our next more
expensive setting counts; if no setting attains it, the ratio is infinite. A rival gets no second choice, which could
only cost it more, and is not charged where it attains less than ours.

P95 is compared at equal device time: the rival's best P95, and our best P95 among the settings that take at most 1%
more device time on both halves. If none takes so little, our cheapest setting counts.

Beside each ratio are lower estimates from the same run: the clairvoyant's device time, if it attains as much; the
device time of one instance per model while it has open requests, if each request ran alone and at once, at most the
whole cluster; and the P95 of prompts that run alone on a present instance.

Without ``--tune`` and ``--score``, each trace of ``--traces`` is split in halves. If that folder is missing, a trace is
generated from the seed, and ``conditions`` says so.

``--size`` measures the simulator itself: the CPU time of an hour of 1,000 devices and of ten minutes of 10,000, and the
CPU time of a request by cluster size.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import repeat
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.report import Check, finish, parser_of, progress
from bench.simulation.load import ZIPF, copies_for
from bench.simulation.results import draw, write_json, write_table
from bench.simulation.size import compared_interval, shortest_s, size_figures
from torchrelay.sim.fleets import CLUSTER_A, CLUSTER_B, twelve_models
from torchrelay.sim.plots import plot_runs
from torchrelay.sim.policies.runs import Run, run_system
from torchrelay.sim.policies.setup import Knobs
from torchrelay.sim.policies.systems import SYSTEMS
from torchrelay.sim.scenario import Fleet, Request
from torchrelay.sim.summary import Summary, percentile
from torchrelay.sim.traces import Arrival, halves, read_trace, requests_of

TRACES = Path(__file__).parents[2] / "shared" / "traces"
FLEETS: Mapping[str, Fleet] = {"A": CLUSTER_A, "B": CLUSTER_B}
MODELS = twelve_models()
SEED = 1
EQUAL = 0.99  # share of an attainment or a price that counts as equal
GRID = [Knobs(float(round(820 ** (point / 9))), (4, 16)[point % 2]) for point in range(10)]  # 1 s to 820 s
QUICK_GRID = [Knobs(10.0, 4), Knobs(60.0, 16)]
RIVALS = {
    "oracle": ["clairvoyant"],
    "serverlessllm": ["serverlessllm"],
    "blitz": ["blitzscale_min0", "blitzscale_min1"],
    "distserve": ["distserve_mean", "distserve_peak"],
    "allcache": ["all_cache"],
}
GPU_BOUNDS = {"oracle": 1.3, "serverlessllm": 0.8, "blitz": 0.9, "distserve": 0.7}
P95_BOUNDS = {"serverlessllm": 0.5, "allcache": 1.0}


@dataclass(frozen=True)
class Case:
    """A trace on a cluster: the requests to tune on, and those to score on."""

    trace: str
    fleet: str
    tune: Sequence[Request]
    score: Sequence[Request]


@dataclass(frozen=True)
class Tuned:
    """A setting of a system, and its figures on the tuning half."""

    system: str
    knobs: Knobs
    summary: Summary


@dataclass(frozen=True)
class Comparison:
    name: str
    ratio: float
    text: str


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, "one minute of each half of one trace, and two settings per system")
    parser.add_argument("--traces", type=Path, default=TRACES, help="a folder of CSV files (%(default)s)")
    parser.add_argument("--tune", type=Path, help="a trace to tune on, with --score")
    parser.add_argument("--score", type=Path, help="a trace to score on, with --tune")
    parser.add_argument(
        "--devices", type=int, nargs="+", default=(), help="with --size: only clusters with these numbers of devices"
    )
    parser.add_argument(
        "--seconds", type=float, help="length of each half (300; quick: 60); with --size: the longest run"
    )
    parser.add_argument("--out", type=Path, help="a folder for tables, plots, seeds and tuned parameters")
    parser.add_argument("--size", action="store_true", help="measure the cost of simulating large clusters instead")
    options = parser.parse_args()
    if (options.tune is None) != (options.score is None):
        parser.error("--tune and --score go together")
    return options


def traces(options: argparse.Namespace) -> dict[str, tuple[list[Arrival], list[Arrival]]]:
    if options.tune:
        return {f"{options.tune.stem}, {options.score.stem}": (read_trace(options.tune), read_trace(options.score))}
    files = sorted(options.traces.glob("*.csv"))
    if files:
        return {file.stem: halves(read_trace(file)) for file in files}
    return {"generated": halves(generated(SEED))}


def generated(seed: int) -> list[Arrival]:
    """Generates bursts of ten seconds, one or two per minute, over a steady low rate."""
    random_ = random.Random(seed)
    arrivals, at = [], 0.0
    while at < 1200.0:
        at += random_.expovariate(8.0 if at % 45.0 < 10.0 else 1.0)
        num_prompt, num_output = random_.lognormvariate(6.9, 1.0), random_.lognormvariate(4.5, 0.8)
        arrivals.append(Arrival(at, min(int(num_prompt) + 1, 8000), min(int(num_output) + 1, 1000)))
    return arrivals


def requests(arrivals: Sequence[Arrival], fleet: Fleet, seconds: float, seed: int) -> list[Request]:
    """Requests that use half of the fleet, from the first ``seconds`` of the arrivals."""
    begin = arrivals[0].at
    part = [replace(arrival, at=arrival.at - begin) for arrival in arrivals if arrival.at < begin + seconds]
    return requests_of(part, MODELS, copies_for(fleet, MODELS, part, seconds), ZIPF, seed)


def run(case: Case, system: str, knobs: Knobs, requests: Sequence[Request]) -> Run:
    return run_system(system, FLEETS[case.fleet], MODELS, knobs, requests, case.tune)


def prompt_alone_s(request: Request) -> float:
    """Seconds to compute the request's prompt on an instance without other work."""
    model = next(model for model in MODELS if model.name == request.model)
    return model.latency.prefill_s(request.num_prompt_tokens)


def in_use_device_s(requests: Sequence[Request], fleet: Fleet) -> float:
    """Device seconds of one instance per model while it has open requests, from the first arrival to the last, if each
    request ran alone and at once.
    """
    end = max(request.arrives_at for request in requests)
    taken_s = 0.0
    for model in MODELS:
        until = 0.0
        own = [request for request in requests if request.model == model.name]
        for request in sorted(own, key=lambda request: request.arrives_at):
            answer_s = (request.num_output_tokens - 1) * model.latency.tbt_s(1, request.num_prompt_tokens)
            ends_at = min(request.arrives_at + prompt_alone_s(request) + answer_s, end)
            taken_s += model.num_devices * max(ends_at - max(until, request.arrives_at), 0.0)
            until = max(until, ends_at)
    return min(taken_s, fleet.num_devices * (end - min(request.arrives_at for request in requests)))


def of_systems(tuned: Sequence[Tuned], systems: Sequence[str]) -> list[Tuned]:
    return [setting for setting in tuned if setting.system in systems]


def cheapest(settings: Sequence[Tuned], attainment: float) -> Tuned:
    return min(attaining(settings, attainment), key=lambda setting: setting.summary.device_s)


def attaining(settings: Sequence[Tuned], attainment: float) -> list[Tuned]:
    """Settings that attain as much as ``attainment``."""
    return [setting for setting in settings if setting.summary.attainment >= EQUAL * attainment]


def best_attainment(settings: Sequence[Tuned]) -> float:
    return max(setting.summary.attainment for setting in settings)


def compare(case: Case, tuned: Sequence[Tuned]) -> list[Comparison]:
    @cache
    def scored(setting: Tuned) -> Summary:
        return run(case, setting.system, setting.knobs, case.score).summary

    return [
        *(compare_device_time(case, tuned, rival, scored) for rival in GPU_BOUNDS),
        *(compare_p95(case, tuned, rival, scored) for rival in P95_BOUNDS),
        compare_attainment(case, tuned, scored),
    ]


def compare_device_time(
    case: Case, tuned: Sequence[Tuned], rival: str, scored: Callable[[Tuned], Summary]
) -> Comparison:
    name, where = f"gpu_over_{rival}", f"{case.trace} on {case.fleet}"
    ours, others = of_systems(tuned, ["ours"]), of_systems(tuned, RIVALS[rival])
    both_attain = min(best_attainment(ours), best_attainment(others))
    other = scored(cheapest(others, both_attain))
    equal = sorted(attaining(ours, both_attain), key=lambda setting: setting.summary.device_s)
    by_price = [scored(setting) for setting in equal]
    limit, clairvoyant = "", of_systems(tuned, ["clairvoyant"])
    if rival != "oracle" and best_attainment(clairvoyant) >= EQUAL * both_attain:
        least = scored(cheapest(clairvoyant, both_attain))
        if least.attainment >= EQUAL * other.attainment:
            limit = f"; the clairvoyant {_ratio(least.device_s, other.device_s):.3f}"
    if rival != "oracle":
        limit += f"; models in use {_ratio(in_use_device_s(case.score, FLEETS[case.fleet]), other.device_s):.3f}"
    mine = next((summary for summary in by_price if summary.attainment >= EQUAL * other.attainment), None)
    if mine is None:
        most = max(by_price, key=lambda summary: summary.attainment)
        text = (
            f"{where}: ours attains {most.attainment:.3f} of {other.attainment:.3f} at most, "
            f"{most.device_s:.0f} and {other.device_s:.0f} device s{limit}"
        )
        return Comparison(name, math.inf, text)
    text = (
        f"{where}: {mine.device_s:.0f} over {other.device_s:.0f} device s, "
        f"attained {mine.attainment:.3f} and {other.attainment:.3f}{limit}"
    )
    return Comparison(name, _ratio(mine.device_s, other.device_s), text)


def compare_p95(case: Case, tuned: Sequence[Tuned], rival: str, scored: Callable[[Tuned], Summary]) -> Comparison:
    ours, others = of_systems(tuned, ["ours"]), of_systems(tuned, RIVALS[rival])
    chosen = min(others, key=lambda setting: (setting.summary.ttft_p95_s, setting.summary.device_s))
    other = scored(chosen)
    affordable = [
        setting
        for setting in sorted(ours, key=lambda setting: setting.summary.ttft_p95_s)
        if setting.summary.device_s * EQUAL <= chosen.summary.device_s
        and scored(setting).device_s * EQUAL <= other.device_s
    ]
    mine = scored(affordable[0] if affordable else min(ours, key=lambda setting: scored(setting).device_s))
    alone_s = percentile((prompt_alone_s(request) for request in case.score), 95)
    text = (
        f"{case.trace} on {case.fleet}: {mine.ttft_p95_s:.2f} s and {other.ttft_p95_s:.2f} s, {mine.device_s:.0f} and "
        f"{other.device_s:.0f} device s; prompts alone {_ratio(alone_s, other.ttft_p95_s):.3f}"
    )
    return Comparison(f"p95_over_{rival}", _ratio(mine.ttft_p95_s, other.ttft_p95_s), text)


def compare_attainment(case: Case, tuned: Sequence[Tuned], scored: Callable[[Tuned], Summary]) -> Comparison:
    ours = of_systems(tuned, ["ours"])
    existing = of_systems(tuned, [system for system in SYSTEMS if system != "clairvoyant"])
    best = cheapest(existing, best_attainment(existing))
    mine, other = scored(cheapest(ours, best_attainment(ours))), scored(best)
    text = f"{case.trace} on {case.fleet}: {mine.attainment:.3f}, {best.system} {other.attainment:.3f}"
    return Comparison("attainment_over_best", _ratio(mine.attainment, other.attainment), text)


def _ratio(mine: float, other: float) -> float:
    """``mine`` over ``other``; infinite if ours is, as with refused requests."""
    return mine / other if math.isfinite(mine) and other else math.inf


def solve(case: Case, grid: Sequence[Knobs]) -> tuple[Case, list[Tuned], list[Comparison]]:
    tuned = [Tuned(system, knobs, run(case, system, knobs, case.tune).summary) for system in SYSTEMS for knobs in grid]
    return case, tuned, compare(case, tuned)


def write_case(folder: Path, case: Case, tuned: Sequence[Tuned], pool: ProcessPoolExecutor) -> None:
    """Writes figures on both halves, and plots, of each system's cheapest setting that attains its best."""
    chosen = []
    for system in SYSTEMS:
        of_system = of_systems(tuned, [system])
        chosen.append(cheapest(of_system, best_attainment(of_system)))
    systems, knobs = [setting.system for setting in chosen], [setting.knobs for setting in chosen]
    runs = list(pool.map(run, repeat(case), systems, knobs, repeat(case.score)))
    name = f"{case.trace}-{case.fleet}".replace(", ", "-")
    rows = [
        {"system": run.system, **asdict(setting.knobs), "half": half, **asdict(summary)}
        for setting, run in zip(chosen, runs, strict=True)
        for half, summary in (("tuned on", setting.summary), ("scored", run.summary))
    ]
    write_table(folder / f"{name}.csv", rows)
    title = f"{case.trace} on {case.fleet}: {len(case.score):,} requests"
    draw(plot_runs, folder / f"{name}.png", runs, title)


def worst(name: str, comparisons: Sequence[Comparison], bound: float, *, at_least: bool = False) -> Check:
    """Check of the worst ratio of all cases."""
    own = [comparison for comparison in comparisons if comparison.name == name]
    case = (min if at_least else max)(own, key=lambda comparison: comparison.ratio)
    return Check(name, case.ratio, "", bound, case.text, at_least=at_least)


def main() -> None:
    options = arguments()
    if options.size:
        name, halved = next(reversed(traces(options).items()))
        conditions = {
            "quick": options.quick,
            "seconds": options.seconds,
            "seed": SEED,
            "trace": name,
            "cost_of_requests_that_came_between_s": compared_interval(
                shortest_s(options.seconds, is_quick=options.quick)
            ),
        }
        figures = size_figures(
            halved[0],
            is_quick=options.quick,
            num_devices=options.devices,
            most_seconds=options.seconds,
            out=options.out,
        )
        finish("simulate_size", conditions, figures)
    seconds = options.seconds or (60.0 if options.quick else 300.0)
    grid = QUICK_GRID if options.quick else GRID
    cases = [
        Case(
            name, fleet, requests(tune, FLEETS[fleet], seconds, SEED), requests(score, FLEETS[fleet], seconds, SEED + 1)
        )
        for name, (tune, score) in list(traces(options).items())[-1 if options.quick else None :]
        for fleet in FLEETS
    ]
    compared: list[Comparison] = []
    rows = []
    with ProcessPoolExecutor() as pool:
        for case, tuned, comparisons in pool.map(solve, cases, [grid] * len(cases)):
            progress(
                f"{case.trace} on {case.fleet}: {len(case.tune)} requests to tune on, {len(case.score)} to score on"
            )
            for setting in tuned:
                knobs, summary = setting.knobs, setting.summary
                progress(
                    f"  {setting.system:<16} {knobs.idle_timeout_s:>5g} s, {knobs.requests_per_instance:>2} each: "
                    f"attained {summary.attainment:.3f}, P95 {summary.ttft_p95_s:7.2f} s, "
                    f"{summary.device_s:6.0f} device s"
                )
                rows.append({"trace": case.trace, "fleet": case.fleet, **asdict(setting)})
            for comparison in comparisons:
                progress(f"  {comparison.name:<24} {comparison.ratio:6.3f}  {comparison.text}")
            compared += comparisons
            if options.out:
                write_case(options.out, case, tuned, pool)
    if options.out:
        table = {"seed": SEED, "zipf": ZIPF, "tuned": rows, "scored": [asdict(comparison) for comparison in compared]}
        write_json(options.out / "simulate.json", table)
    checks = [worst(f"gpu_over_{rival}", compared, bound) for rival, bound in GPU_BOUNDS.items()]
    checks += [worst(f"p95_over_{rival}", compared, bound) for rival, bound in P95_BOUNDS.items()]
    checks.append(worst("attainment_over_best", compared, EQUAL, at_least=True))
    names = sorted({case.trace for case in cases})
    finish("simulate", {"quick": options.quick, "seconds": seconds, "seed": SEED, "traces": names}, checks)


if __name__ == "__main__":
    main()
