"""Large clusters in virtual time: the CPU time that a simulated hour takes, and what a request costs by size."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import count
from multiprocessing import get_context
from pathlib import Path

from bench.report import Check, progress
from bench.simulation.results import draw, write_json
from torchrelay.scheduler.policy import effects, inputs
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.policy import Policy
from torchrelay.sim.fleets import CLUSTER_A, published_models
from torchrelay.sim.plant import START_S, Plant
from torchrelay.sim.plots import plot_by_size
from torchrelay.sim.policies.setup import one_copy_each
from torchrelay.sim.scenario import Fleet, Request, ServedModel
from torchrelay.sim.traces import Arrival, repeated, request_stream

ZIPF = 1.0
USE = 0.5  # of the slots of the size that is scarcest
_BATCH = 16  # of a decoding instance
_SETTLE_S = 5.0
STRETCH_S = (30.0, 90.0)  # of arrivals: models that nobody called are all loaded at once before
_PROGRESS_EVERY_S = 60.0
_MOST_INSTANCES = 10_000  # of a model: as many as it needs


@dataclass(frozen=True)
class Size:
    num_devices: int
    num_models: int
    seconds: float
    seed: int = 1


@dataclass(frozen=True)
class SizeRun:
    """CPU seconds of everything from the start to the last answer, and seconds of it in the policy; the same of the
    arrivals of the stretch that all sizes are compared by.
    """

    size: Size
    num_requests: int
    num_refused: int
    attainment: float
    num_loads: int
    cpu_s: float
    policy_s: float
    num_stretch_requests: int
    stretch_cpu_s: float
    stretch_policy_s: float
    requests_per_s: float  # in the mean of the whole trace

    @property
    def cpu_s_per_request(self) -> float:
        return self.stretch_cpu_s / max(self.num_stretch_requests, 1)

    @property
    def policy_s_per_request(self) -> float:
        return self.stretch_policy_s / max(self.num_stretch_requests, 1)

    def expected_s(self, seconds: float) -> float:
        """CPU seconds of a run of so many seconds, if a request goes on to cost what it does in the stretch."""
        num_left = self.requests_per_s * seconds - self.num_requests
        return self.cpu_s + max(num_left, 0.0) * self.cpu_s_per_request

    def row(self) -> dict[str, object]:
        return {**asdict(self), "cpu_us_per_request": self.cpu_s_per_request * 1e6}


class TimedPolicy:
    """The policy, and the time that it takes: by the wall, as a thread's CPU time costs a system call."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.taken_s = 0.0

    def apply(self, input_: inputs.Input, now: float) -> effects.Effects:
        begin = time.perf_counter()
        caused = self._policy.apply(input_, now)
        self.taken_s += time.perf_counter() - begin
        return caused

    def next_due(self) -> float:
        return self._policy.next_due()


def stretch(seconds: float) -> tuple[float, float]:
    """Of a run of so many seconds: where it begins and ends."""
    begin_s, end_s = STRETCH_S
    return min(begin_s, seconds / 3), min(end_s, seconds)


def shortest_s(most_seconds: float | None, *, is_quick: bool) -> float:
    """Of the runs of all sizes, cut to so many seconds."""
    seconds = min(size.seconds for size in (QUICK if is_quick else FULL))
    return seconds if most_seconds is None else min(seconds, most_seconds)


def copies_for(fleet: Fleet, models: Sequence[ServedModel], arrivals: Sequence[Arrival], seconds: float) -> float:
    """How often each arrival must happen so that prompts and answers take ``USE`` of the slots that are scarcest."""
    weights = [1 / rank**ZIPF for rank in range(1, len(models) + 1)]
    num_prompt_tokens = sum(one.num_prompt_tokens for one in arrivals)
    num_output_tokens = sum(one.num_output_tokens for one in arrivals)
    taken_s: dict[int, float] = {}
    for model, weight in zip(models, weights, strict=True):
        token_s = model.latency.tbt_s(_BATCH, 1000 * _BATCH) / _BATCH
        work_s = num_prompt_tokens / model.prefill_tokens_per_s + num_output_tokens * token_s
        taken_s[model.num_devices] = taken_s.get(model.num_devices, 0.0) + weight / sum(weights) * work_s
    return min(USE * seconds * fleet.num_hosts * fleet.groups.count(size) / work_s for size, work_s in taken_s.items())


def measure(size: Size, arrivals: Sequence[Arrival]) -> SizeRun:
    """Simulates the cluster under the scheduler's own strategies, arrivals repeated for so long."""
    fleet = replace(CLUSTER_A, num_hosts=max(size.num_devices // sum(CLUSTER_A.groups), 1))
    models = published_models(size.num_models)
    length_s = arrivals[-1].at - arrivals[0].at
    copies = copies_for(fleet, models, arrivals, length_s)
    ids = count()
    config = PolicyConfig(max_instances=_MOST_INSTANCES, queue_limit_total=1024 * size.num_models)
    timed = TimedPolicy(Policy(config, lambda: f"instance-{next(ids)}", START_S))
    plant = Plant(timed, fleet, models, held=one_copy_each(fleet, models))
    stretch_begin_s, stretch_end_s = stretch(size.seconds)
    due = deque([stretch_begin_s, stretch_end_s])
    marks: list[tuple[float, float, int]] = []
    num_requests, next_progress_s = 0, _PROGRESS_EVERY_S

    def mark() -> None:
        marks.append((time.process_time(), timed.taken_s, num_requests))

    def watched(requests: Iterator[Request]) -> Iterator[Request]:
        nonlocal num_requests, next_progress_s
        for request in requests:
            while due and request.arrives_at >= due[0]:
                due.popleft()
                mark()
            if request.arrives_at >= next_progress_s:
                used = f"{num_requests:,} requests, {time.process_time() - begin:.1f} CPU s"
                progress(f"{size.num_devices:,} devices, {next_progress_s:g} s: {used}")
                next_progress_s += _PROGRESS_EVERY_S
            num_requests += 1
            yield request
        for _ in due:
            mark()

    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # millions of outcomes are kept, and none is garbage
    begin = time.process_time()
    repeat = repeated(arrivals, size.seconds)
    outcomes = plant.run(watched(request_stream(repeat, models, copies, ZIPF, size.seed)), _SETTLE_S)
    cpu_s = time.process_time() - begin
    (first_s, first_policy_s, num_before), (last_s, last_policy_s, num_after) = marks
    served = plant.served
    return SizeRun(
        size,
        num_requests,
        sum(outcome.is_refused for outcome in outcomes),
        sum(outcome.attains(served[outcome.request.model]) for outcome in outcomes) / max(num_requests, 1),
        plant.spent.num_loads,
        cpu_s,
        timed.taken_s,
        num_after - num_before,
        last_s - first_s,
        last_policy_s - first_policy_s,
        copies * len(arrivals) / length_s,
    )


def measure_each(sizes: Sequence[Size], arrivals: Sequence[Arrival]) -> Iterator[SizeRun]:
    """One after the other, each in a fresh process: one core."""
    for size in sizes:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            yield pool.submit(measure, size, arrivals).result()


FULL = (
    Size(100, 30, 90.0),
    Size(300, 90, 90.0),
    Size(1000, 300, 3600.0),
    Size(3000, 550, 90.0),
    Size(10000, 1000, 600.0),
)
QUICK = (Size(100, 30, 20.0), Size(200, 60, 20.0), Size(300, 90, 20.0))


def checks_of(runs: Sequence[SizeRun], *, is_quick: bool) -> list[Check]:
    """The figures of these runs. A run that was cut short gives what the whole one is expected to take, unbounded."""
    prefix = "quick_" if is_quick else ""
    found = []
    for run in runs:
        whole = next((size for size in FULL if size.num_devices == run.size.num_devices), run.size)
        place = f"{run.size.num_devices:,} devices, {run.size.num_models} models"
        text = f"{place}, {run.num_requests:,} requests in {run.size.seconds:g} s, attained {run.attainment:.3f}"
        if whole.seconds >= 600 and not is_quick:
            is_hour = whole.seconds == 3600
            name = f"{'hour' if is_hour else 'ten_min'}_{whole.num_devices}_min"
            if run.size == whole:
                found.append(Check(name, run.cpu_s / 60, "min", 20.0 if is_hour else None, text))
            else:
                found.append(Check(f"expected_{name}", run.expected_s(whole.seconds) / 60, "min", None, text))
        us = f"policy {run.policy_s_per_request * 1e6:.0f} us by the wall clock; {text}"
        found.append(
            Check(f"{prefix}us_per_request_{run.size.num_devices}", run.cpu_s_per_request * 1e6, "us", None, us)
        )
    costs = [run.cpu_s_per_request for run in runs]
    text = (
        f"the dearest request over the cheapest, {runs[0].size.num_devices:,} to {runs[-1].size.num_devices:,} devices"
    )
    if len(runs) > 1:
        found.append(Check(f"{prefix}cost_growth", max(costs) / min(costs), "", 2.0, text))
    return found


def size_figures(
    arrivals: Sequence[Arrival],
    *,
    is_quick: bool,
    num_devices: Collection[int] = (),
    most_seconds: float | None = None,
    out: Path | None = None,
) -> list[Check]:
    """Measures the sizes of ``num_devices``, or all, for at most so many seconds each. Figures and plot are written to
    ``out``.
    """
    sizes = [size for size in (QUICK if is_quick else FULL) if size.num_devices in num_devices or not num_devices]
    if most_seconds is not None:
        sizes = [replace(size, seconds=min(size.seconds, most_seconds)) for size in sizes]
    runs = []
    for run in measure_each(sizes, arrivals):
        progress(
            f"{run.size.num_devices:,} devices, {run.num_requests:,} requests: {run.cpu_s:.1f} CPU s, in the stretch "
            f"{run.cpu_s_per_request * 1e6:.0f} us each, policy {run.policy_s_per_request * 1e6:.0f} us (wall)"
        )
        runs.append(run)
    if out is not None:
        write_json(out / "size.json", {"runs": [run.row() for run in runs]})
        lines = {
            "all": [(float(run.size.num_devices), run.cpu_s_per_request * 1e6) for run in runs],
            "policy (wall clock)": [(float(run.size.num_devices), run.policy_s_per_request * 1e6) for run in runs],
        }
        draw(plot_by_size, out / "size.png", lines, "Time of a simulated request: all in CPU time", "us")
    return checks_of(runs, is_quick=is_quick)
