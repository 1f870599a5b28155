"""Cases of the simulation: a trace on a cluster, with a seed that shifts each model's arrivals by its own time."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.rivals.systems import SYSTEMS
from bench.simulation.load import ZIPF, copies_for
from torchrelay.sim.fleets import CLUSTER_A, CLUSTER_B, twelve_models
from torchrelay.sim.scenario import Fleet, Request
from torchrelay.sim.setup import Knobs
from torchrelay.sim.traces import Arrival, read_trace, requests_of

TRACES = Path(__file__).parents[3] / "shared" / "traces"
FLEETS: Mapping[str, Fleet] = {"A": CLUSTER_A, "B": CLUSTER_B}
MODELS = twelve_models()
SETTLE_S = 5.0  # from the start of the cluster to the first arrival
WARM_UP_S = 60.0  # of arrivals that do not count
GIVEN_UP_S = 60.0  # after the last arrival, no request can meet its target any more


@dataclass(frozen=True)
class Case:
    """Requests of a trace on a cluster; those of the first ``WARM_UP_S`` do not count."""

    trace: str
    fleet: str
    seed: int
    requests: Sequence[Request]

    @property
    def group(self) -> tuple[str, str]:
        """Cases with the same trace and cluster."""
        return self.trace, self.fleet

    @property
    def counted(self) -> list[Request]:
        return [request for request in self.requests if request.arrives_at >= WARM_UP_S]


@dataclass(frozen=True)
class Outcome:
    """A system's figures in a case."""

    device_s: float
    num_late: int  # of the counted requests: those that missed an objective, or got no answer
    num_open: int  # of the counted requests, at the last arrival
    ttfts_s: Sequence[float]  # without a first token: until the simulation ended

    @property
    def num_requests(self) -> int:
        return len(self.ttfts_s)


def read_traces(folder: Path) -> dict[str, list[Arrival]]:
    """Traces of the folder by short name; without any, a generated one."""
    files = sorted(folder.glob("*.csv"))
    return {file.stem.split("_")[1]: read_trace(file) for file in files} or {"generated": generated(1)}


def generated(seed: int) -> list[Arrival]:
    """Generates bursts of ten seconds, one or two per minute, over a steady low rate."""
    random_ = random.Random(seed)
    arrivals, at = [], 0.0
    while at < 1200.0:
        at += random_.expovariate(8.0 if at % 45.0 < 10.0 else 1.0)
        num_prompt, num_output = random_.lognormvariate(6.9, 1.0), random_.lognormvariate(4.5, 0.8)
        arrivals.append(Arrival(at, min(int(num_prompt) + 1, 8000), min(int(num_output) + 1, 1000)))
    return arrivals


def case_of(trace: str, arrivals: Sequence[Arrival], fleet: str, seed: int, seconds: float) -> Case:
    """The first ``seconds``, after the warm-up, of requests that use half of the fleet in the mean of the trace."""
    begin = arrivals[0].at
    arrivals = [replace(arrival, at=arrival.at - begin) for arrival in arrivals]
    copies = copies_for(FLEETS[fleet], MODELS, arrivals, arrivals[-1].at)
    requests = requests_of(arrivals, MODELS, copies, ZIPF, seed)
    return Case(trace, fleet, seed, [request for request in requests if request.arrives_at < WARM_UP_S + seconds])


def cases_of(folder: Path, seeds: Mapping[str, Sequence[int]], seconds: float) -> list[Case]:
    """Cases of all traces in the folder, with these seeds by cluster."""
    return [
        case_of(trace, arrivals, fleet, seed, seconds)
        for trace, arrivals in read_traces(folder).items()
        for fleet, of_fleet in seeds.items()
        for seed in of_fleet
    ]


def run(case: Case, system: str, knobs: Knobs) -> Outcome:
    """Simulates the system. Systems with fixed numbers of instances are sized by the case's own requests."""
    plant = SYSTEMS[system](FLEETS[case.fleet], MODELS, knobs, case.requests).plant(MODELS)
    outcomes = plant.run(case.requests, SETTLE_S, warm_up_s=WARM_UP_S, given_up_s=GIVEN_UP_S)
    num_late = sum(not outcome.attains(plant.served[outcome.request.model]) for outcome in outcomes)
    last = outcomes[-1].arrived_at
    num_open = sum(not outcome.ended_at or outcome.ended_at > last for outcome in outcomes)
    ttfts_s = [min(outcome.ttft_s, last + GIVEN_UP_S - outcome.arrived_at) for outcome in outcomes]
    return Outcome(plant.at_last_arrival.device_s, num_late, num_open, ttfts_s)
