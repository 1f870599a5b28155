"""Large clusters in virtual time: the CPU time of a simulated hour, and of a request by cluster size."""

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
from bench.simulation.load import ZIPF, copies_for
from bench.simulation.plots import plot_by_size
from bench.simulation.results import draw, write_json
from torchrelay.scheduler.policy import effects, inputs
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.policy import Policy
from torchrelay.sim.fleets import CLUSTER_A, published_models
from torchrelay.sim.plant import START_S, Plant
from torchrelay.sim.scenario import Request
from torchrelay.sim.setup import one_copy_each
from torchrelay.sim.traces import Arrival, repeated, request_stream

_SETTLE_S = 5.0
INTERVAL_S = (30.0, 90.0)  # in which all sizes are compared; before it, all models load at the same time
_PROGRESS_EVERY_S = 60.0
_MAX_INSTANCES = 10_000  # of a model: no limit in practice


@dataclass(frozen=True)
class Size:
    num_devices: int
    num_models: int
    seconds: float
    seed: int = 1


@dataclass(frozen=True)
class SizeRun:
    """CPU seconds from the start to the last answer, and the policy's part of them; the same for the interval in which
    all sizes are compared.
    """

    size: Size
    num_requests: int
    num_refused: int
    attainment: float
    num_loads: int
    cpu_s: float
    policy_s: float
    num_interval_requests: int
    interval_cpu_s: float
    interval_policy_s: float
    requests_per_s: float  # mean over the whole trace

    @property
    def cpu_s_per_request(self) -> float:
        return self.interval_cpu_s / max(self.num_interval_requests, 1)

    @property
    def policy_s_per_request(self) -> float:
        return self.interval_policy_s / max(self.num_interval_requests, 1)

    def expected_s(self, seconds: float) -> float:
        """Expected CPU seconds of a run of ``seconds`` if further requests cost as much as those of the interval."""
        num_left = self.requests_per_s * seconds - self.num_requests
        return self.cpu_s + max(num_left, 0.0) * self.cpu_s_per_request

    def row(self) -> dict[str, object]:
        return {**asdict(self), "cpu_us_per_request": self.cpu_s_per_request * 1e6}


class TimedPolicy:
    """The policy and the wall time that it takes; a thread's CPU time would cost a system call."""

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


def compared_interval(seconds: float) -> tuple[float, float]:
    """Begin and end of the compared interval in a run of ``seconds``."""
    begin_s, end_s = INTERVAL_S
    return min(begin_s, seconds / 3), min(end_s, seconds)


def shortest_s(most_seconds: float | None, *, is_quick: bool) -> float:
    """Length of the shortest run, each cut to ``most_seconds``."""
    seconds = min(size.seconds for size in (QUICK if is_quick else FULL))
    return seconds if most_seconds is None else min(seconds, most_seconds)


def measure(size: Size, arrivals: Sequence[Arrival]) -> SizeRun:
    """Simulates the cluster with the scheduler's own strategies; arrivals repeat for ``size.seconds``."""
    fleet = replace(CLUSTER_A, num_hosts=max(size.num_devices // sum(CLUSTER_A.groups), 1))
    models = published_models(size.num_models)
    length_s = arrivals[-1].at - arrivals[0].at
    copies = copies_for(fleet, models, arrivals, length_s)
    ids = count()
    config = PolicyConfig(max_instances=_MAX_INSTANCES, queue_limit_total=1024 * size.num_models)
    timed = TimedPolicy(Policy(config, lambda: f"instance-{next(ids)}", START_S))
    plant = Plant(timed, fleet, models, held=one_copy_each(fleet, models))
    due = deque(compared_interval(size.seconds))
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
    gc.set_threshold(50_000, 20, 20)  # millions of outcomes stay alive, and none is garbage
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
        plant.spent_now().num_loads,
        cpu_s,
        timed.taken_s,
        num_after - num_before,
        last_s - first_s,
        last_policy_s - first_policy_s,
        copies * len(arrivals) / length_s,
    )


def measure_each(sizes: Sequence[Size], arrivals: Sequence[Arrival]) -> Iterator[SizeRun]:
    """Measures the sizes one after another, each in a fresh process on one core."""
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
    """Figures of the runs. A run that was cut short gives the expected time of the whole run, without a bound."""
    prefix = "quick_" if is_quick else ""
    checks = []
    for run in runs:
        whole = next((size for size in FULL if size.num_devices == run.size.num_devices), run.size)
        place = f"{run.size.num_devices:,} devices, {run.size.num_models} models"
        text = f"{place}, {run.num_requests:,} requests in {run.size.seconds:g} s, attained {run.attainment:.3f}"
        if whole.seconds >= 600 and not is_quick:
            is_hour = whole.seconds == 3600
            name = f"{'hour' if is_hour else 'ten_min'}_{whole.num_devices}_min"
            if run.size == whole:
                checks.append(Check(name, run.cpu_s / 60, "min", 20.0 if is_hour else None, text))
            else:
                checks.append(Check(f"expected_{name}", run.expected_s(whole.seconds) / 60, "min", None, text))
        us = f"policy {run.policy_s_per_request * 1e6:.0f} us by the wall clock; {text}"
        checks.append(
            Check(f"{prefix}us_per_request_{run.size.num_devices}", run.cpu_s_per_request * 1e6, "us", None, us)
        )
    costs = [run.cpu_s_per_request for run in runs]
    text = (
        f"the dearest request over the cheapest, {runs[0].size.num_devices:,} to {runs[-1].size.num_devices:,} devices"
    )
    if len(runs) > 1:
        checks.append(Check(f"{prefix}cost_growth", max(costs) / min(costs), "", 2.0, text))
    return checks


def size_figures(
    arrivals: Sequence[Arrival],
    *,
    is_quick: bool,
    num_devices: Collection[int] = (),
    most_seconds: float | None = None,
    out: Path | None = None,
) -> list[Check]:
    """Measures the sizes in ``num_devices`` (empty: all), at most ``most_seconds`` each. Writes figures and a plot to
    ``out``.
    """
    sizes = [size for size in (QUICK if is_quick else FULL) if size.num_devices in num_devices or not num_devices]
    if most_seconds is not None:
        sizes = [replace(size, seconds=min(size.seconds, most_seconds)) for size in sizes]
    runs = []
    for run in measure_each(sizes, arrivals):
        progress(
            f"{run.size.num_devices:,} devices, {run.num_requests:,} requests: {run.cpu_s:.1f} CPU s; compared: "
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
