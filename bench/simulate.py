"""The scheduler against ServerlessLLM, BlitzScale, DistServe, AllCache and a clairvoyant, in virtual time.

Each half of a trace is brought to half of the cluster's capacity, its arrivals divided among twelve models by a Zipf
law. Each system is tuned by the same grid on one half and scored on the other: each point of it has another idle
timeout, which of ours is the price, in seconds of one device. The systems' docstrings
(sim/src/torchrelay/sim/policies) say what is modelled of each.

Device time is compared at equal attainment: each system's cheapest setting that attains 99% of what the lesser of both
attains at best, on the half that they are tuned on. Where ours then does not attain 99% of the rival's on the other
half, its next dearer setting counts, and where none does, the ratio is infinite: no device time buys it. A rival gets
no such second choice, which could only cost it more; and where it attains less than ours, it is not charged for that.

P95 is compared at equal device time: the rival's best one, and our best one that takes no more than 1% more on either
half. Where ours cannot take so little, its cheapest setting counts: the rival would do no worse with as much.

Beside each ratio are estimates of the least that can be had, of the same run: the clairvoyant's device time, if it
attains as much; what one instance of each model takes while any of its requests would be open if each was computed
alone at once, at most the whole cluster; and the P95 of prompts that are computed alone by an instance that is there.

Without ``--tune`` and ``--score``, each trace of ``--traces`` is split in halves; where that folder is missing, a trace
is generated from the seed, and ``conditions`` say so.

``--size`` measures the simulation itself: the CPU time of an hour of 1,000 devices and of ten minutes of 10,000, and
what a request costs by the size of the cluster.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.report import Check, finish, progress
from bench.simulation.results import draw, write_json, write_table
from bench.simulation.size import shortest_s, size_figures, stretch
from torchrelay.sim.fleets import CLUSTER_A, CLUSTER_B, twelve_models
from torchrelay.sim.plots import plot_runs
from torchrelay.sim.policies.runs import SETTLE_S, Run, run_system
from torchrelay.sim.policies.setup import Knobs
from torchrelay.sim.policies.systems import SYSTEMS
from torchrelay.sim.scenario import Fleet, Request
from torchrelay.sim.summary import Summary, percentile, summarize
from torchrelay.sim.traces import Arrival, halves, read_trace, requests_of

TRACES = Path(__file__).parents[2] / "shared" / "traces"
FLEETS: Mapping[str, Fleet] = {"A": CLUSTER_A, "B": CLUSTER_B}
MODELS = twelve_models()
ZIPF, SEED = 1.0, 1
EQUAL = 0.99  # so much of an attainment or a price is as much
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
    """One setting of a system, and what it made of the half that systems are tuned on."""

    system: str
    knobs: Knobs
    summary: Summary


@dataclass(frozen=True)
class Comparison:
    name: str
    ratio: float
    text: str


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute of each half of one trace, and a grid of two")
    parser.add_argument("--traces", type=Path, default=TRACES, help="a folder of CSV files (%(default)s)")
    parser.add_argument("--tune", type=Path, help="a trace to tune on, with --score")
    parser.add_argument("--score", type=Path, help="a trace to score on, with --tune")
    parser.add_argument(
        "--devices", type=int, nargs="+", default=(), help="with --size: only clusters of so many devices"
    )
    parser.add_argument(
        "--seconds", type=float, help="of each half (300; quick: 60); with --size: at most, of each size"
    )
    parser.add_argument(
        "--out", type=Path, help="a folder for the tables, the plots, the seeds and the tuned parameters"
    )
    parser.add_argument("--size", action="store_true", help="large clusters instead: what simulating them costs")
    found = parser.parse_args()
    if (found.tune is None) != (found.score is None):
        parser.error("--tune and --score go together")
    return found


def traces(options: argparse.Namespace) -> dict[str, tuple[list[Arrival], list[Arrival]]]:
    if options.tune:
        return {f"{options.tune.stem}, {options.score.stem}": (read_trace(options.tune), read_trace(options.score))}
    files = sorted(options.traces.glob("*.csv"))
    if files:
        return {file.stem: halves(read_trace(file)) for file in files}
    return {"generated": halves(generated(SEED))}


def generated(seed: int) -> list[Arrival]:
    """Bursts of ten seconds, one or two in a minute, over a steady trickle."""
    random_ = random.Random(seed)
    arrivals, at = [], 0.0
    while at < 1200.0:
        at += random_.expovariate(8.0 if at % 45.0 < 10.0 else 1.0)
        num_prompt, num_output = random_.lognormvariate(6.9, 1.0), random_.lognormvariate(4.5, 0.8)
        arrivals.append(Arrival(at, min(int(num_prompt) + 1, 8000), min(int(num_output) + 1, 1000)))
    return arrivals


def requests(arrivals: Sequence[Arrival], fleet: Fleet, seconds: float, seed: int) -> list[Request]:
    """As many as take half of the slots of the size that is scarcest, by the time that prompts and answers compute."""
    begin = arrivals[0].at
    part = [replace(one, at=one.at - begin) for one in arrivals if one.at < begin + seconds]
    weights = [1 / rank**ZIPF for rank in range(1, len(MODELS) + 1)]
    batch = 16
    taken_s: dict[int, float] = {}
    for model, weight in zip(MODELS, weights, strict=True):
        token_s = model.latency.tbt_s(batch, 1000 * batch) / batch
        work_s = sum(
            one.num_prompt_tokens / model.prefill_tokens_per_s + one.num_output_tokens * token_s for one in part
        )
        taken_s[model.num_devices] = taken_s.get(model.num_devices, 0.0) + weight / sum(weights) * work_s
    copies = min(
        0.5 * seconds * fleet.num_hosts * fleet.groups.count(size) / work_s for size, work_s in taken_s.items()
    )
    return requests_of(part, MODELS, copies, ZIPF, seed)


def run(case: Case, system: str, knobs: Knobs, is_score: bool) -> Summary:
    setup = SYSTEMS[system](FLEETS[case.fleet], MODELS, knobs, case.tune)
    plant = setup.plant(MODELS)
    outcomes = plant.run(case.score if is_score else case.tune, SETTLE_S)
    return summarize(outcomes, plant.served, plant.at_last_arrival)


def prompt_alone_s(request: Request) -> float:
    """Its computation by an instance that does nothing else."""
    model = next(model for model in MODELS if model.name == request.model)
    return model.latency.prefill_s(request.num_prompt_tokens)


def in_use_device_s(requests: Sequence[Request], fleet: Fleet) -> float:
    """Of one instance of each model while any of its requests would be open, from the first arrival to the last, if
    each was computed alone at once.
    """
    end = max(request.arrives_at for request in requests)
    taken_s = 0.0
    for model in MODELS:
        until = 0.0
        for request in sorted((one for one in requests if one.model == model.name), key=lambda one: one.arrives_at):
            answer_s = (request.num_output_tokens - 1) * model.latency.tbt_s(1, request.num_prompt_tokens)
            ends_at = min(request.arrives_at + prompt_alone_s(request) + answer_s, end)
            taken_s += model.num_devices * max(ends_at - max(until, request.arrives_at), 0.0)
            until = max(until, ends_at)
    return min(taken_s, fleet.num_devices * (end - min(request.arrives_at for request in requests)))


def of_systems(tuned: Sequence[Tuned], systems: Sequence[str]) -> list[Tuned]:
    return [one for one in tuned if one.system in systems]


def cheapest(settings: Sequence[Tuned], attainment: float) -> Tuned:
    enough = [one for one in settings if one.summary.attainment >= EQUAL * attainment]
    return min(enough, key=lambda one: one.summary.device_s)


def best_attainment(settings: Sequence[Tuned]) -> float:
    return max(one.summary.attainment for one in settings)


def compare(case: Case, tuned: Sequence[Tuned]) -> list[Comparison]:
    @cache
    def scored(one: Tuned) -> Summary:
        return run(case, one.system, one.knobs, True)

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
    equal = [one for one in ours if one.summary.attainment >= EQUAL * both_attain]
    by_price = [scored(one) for one in sorted(equal, key=lambda one: one.summary.device_s)]
    limit, clairvoyant = "", of_systems(tuned, ["clairvoyant"])
    if rival != "oracle" and best_attainment(clairvoyant) >= EQUAL * both_attain:
        least = scored(cheapest(clairvoyant, both_attain))
        if least.attainment >= EQUAL * other.attainment:
            limit = f"; the clairvoyant {_ratio(least.device_s, other.device_s):.3f}"
    if rival != "oracle":
        limit += f"; models in use {_ratio(in_use_device_s(case.score, FLEETS[case.fleet]), other.device_s):.3f}"
    mine = next((one for one in by_price if one.attainment >= EQUAL * other.attainment), None)
    if mine is None:
        most = max(by_price, key=lambda one: one.attainment)
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
    chosen = min(others, key=lambda one: (one.summary.ttft_p95_s, one.summary.device_s))
    other = scored(chosen)
    affordable = [
        one
        for one in sorted(ours, key=lambda one: one.summary.ttft_p95_s)
        if one.summary.device_s * EQUAL <= chosen.summary.device_s and scored(one).device_s * EQUAL <= other.device_s
    ]
    mine = scored(affordable[0] if affordable else min(ours, key=lambda one: scored(one).device_s))
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
    """Infinite, if ours is: of what was refused."""
    return mine / other if math.isfinite(mine) and other else math.inf


def solve(case: Case, grid: Sequence[Knobs]) -> tuple[Case, list[Tuned], list[Comparison]]:
    tuned = [Tuned(system, knobs, run(case, system, knobs, False)) for system in SYSTEMS for knobs in grid]
    return case, tuned, compare(case, tuned)


def scored_run(case: Case, one: Tuned) -> Run:
    """The setting on the half that is scored, over time."""
    return run_system(one.system, FLEETS[case.fleet], MODELS, one.knobs, case.score, case.tune)


def write_case(folder: Path, case: Case, tuned: Sequence[Tuned], pool: ProcessPoolExecutor) -> None:
    """The cheapest setting of each system that attains what it can: its figures on both halves, and the plots."""
    chosen = []
    for system in SYSTEMS:
        of_system = of_systems(tuned, [system])
        chosen.append(cheapest(of_system, best_attainment(of_system)))
    runs = list(pool.map(scored_run, [case] * len(chosen), chosen))
    name = f"{case.trace}-{case.fleet}".replace(", ", "-")
    rows = [
        {"system": run.system, **asdict(one.knobs), "half": half, **asdict(summary)}
        for one, run in zip(chosen, runs, strict=True)
        for half, summary in (("tuned on", one.summary), ("scored", run.summary))
    ]
    write_table(folder / f"{name}.csv", rows)
    title = f"{case.trace} on {case.fleet}: {len(case.score):,} requests"
    draw(plot_runs, folder / f"{name}.png", runs, title)


def worst(name: str, found: Sequence[Comparison], key: Callable[[Sequence[float]], float]) -> tuple[float, str]:
    of_name = [one for one in found if one.name == name]
    value = key([one.ratio for one in of_name])
    return value, next(one.text for one in of_name if one.ratio == value)


def main() -> None:
    options = arguments()
    if options.size:
        name, halved = next(reversed(traces(options).items()))
        conditions = {
            "quick": options.quick,
            "seconds": options.seconds,
            "seed": SEED,
            "trace": name,
            "cost_of_requests_that_came_between_s": stretch(shortest_s(options.seconds, is_quick=options.quick)),
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
    found: list[Comparison] = []
    rows = []
    with ProcessPoolExecutor() as pool:
        for case, tuned, comparisons in pool.map(solve, cases, [grid] * len(cases)):
            progress(
                f"{case.trace} on {case.fleet}: {len(case.tune)} requests to tune on, {len(case.score)} to score on"
            )
            for one in tuned:
                knobs, summary = one.knobs, one.summary
                progress(
                    f"  {one.system:<16} {knobs.idle_timeout_s:>5g} s, {knobs.requests_per_instance:>2} each: attained "
                    f"{summary.attainment:.3f}, P95 {summary.ttft_p95_s:7.2f} s, {summary.device_s:6.0f} device s"
                )
                rows.append({"trace": case.trace, "fleet": case.fleet, **asdict(one)})
            for comparison in comparisons:
                progress(f"  {comparison.name:<24} {comparison.ratio:6.3f}  {comparison.text}")
            found += comparisons
            if options.out:
                write_case(options.out, case, tuned, pool)
    if options.out:
        table = {"seed": SEED, "zipf": ZIPF, "tuned": rows, "scored": [asdict(one) for one in found]}
        write_json(options.out / "simulate.json", table)
    checks = []
    for rival, bound in GPU_BOUNDS.items():
        value, text = worst(f"gpu_over_{rival}", found, max)
        checks.append(Check(f"gpu_over_{rival}", value, "", bound, text))
    for rival, bound in P95_BOUNDS.items():
        value, text = worst(f"p95_over_{rival}", found, max)
        checks.append(Check(f"p95_over_{rival}", value, "", bound, text))
    value, text = worst("attainment_over_best", found, min)
    checks.append(Check("attainment_over_best", value, "", EQUAL, text, at_least=True))
    names = sorted({case.trace for case in cases})
    finish("simulate", {"quick": options.quick, "seconds": seconds, "seed": SEED, "traces": names}, checks)


if __name__ == "__main__":
    main()
