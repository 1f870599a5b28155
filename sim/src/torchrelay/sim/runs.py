"""Runs of systems on the same requests, and their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrelay.sim.scenario import Fleet, Request, ServedModel
from torchrelay.sim.setup import Knobs, System
from torchrelay.sim.summary import Summary, summarize
from torchrelay.sim.timeline import Sample, ttfts_over_time

_SETTLE_S = 30.0  # for instances that are loaded at the start
_NUM_INTERVALS = 60  # of TTFT over time
_PERCENTS = (50, 95)


@dataclass(frozen=True)
class Run:
    """A system's run. ``ttfts``: the middle of each interval, and P50 and P95 of requests that arrived in it."""

    system: str
    summary: Summary
    samples: Sequence[Sample]
    ttfts: Sequence[tuple[float, list[float]]]


def run_system(
    name: str,
    system: System,
    fleet: Fleet,
    models: Sequence[ServedModel],
    knobs: Knobs,
    requests: Sequence[Request],
    tuned_on: Sequence[Request],
) -> Run:
    """Runs a system. ``tuned_on`` sizes fixed numbers of instances. Raises ``ValueError`` without requests."""
    plant = system(fleet, models, knobs, tuned_on).plant(models)
    outcomes = plant.run(requests, _SETTLE_S)
    summary = summarize(outcomes, plant.served, plant.at_last_arrival)
    width_s = max((outcomes[-1].arrived_at - outcomes[0].arrived_at) / _NUM_INTERVALS, 1.0)
    return Run(name, summary, plant.samples, ttfts_over_time(outcomes, width_s, _PERCENTS))
