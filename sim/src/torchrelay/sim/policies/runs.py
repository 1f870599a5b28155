"""Runs of systems on the same requests, and what each came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrelay.sim.policies.setup import Knobs
from torchrelay.sim.policies.systems import SYSTEMS
from torchrelay.sim.scenario import Fleet, Request, ServedModel
from torchrelay.sim.summary import Summary, summarize
from torchrelay.sim.timeline import Sample, ttfts_over_time

SETTLE_S = 30.0  # for what is loaded at the start
_NUM_STRETCHES = 60  # of the time, for TTFT
_PERCENTS = (50, 95)


@dataclass(frozen=True)
class Run:
    """``ttfts``: the middle of each stretch of time, and P50 and P95 of what arrived in it."""

    system: str
    summary: Summary
    samples: Sequence[Sample]
    ttfts: Sequence[tuple[float, list[float]]]


def run_system(
    system: str,
    fleet: Fleet,
    models: Sequence[ServedModel],
    knobs: Knobs,
    requests: Sequence[Request],
    tuned_on: Sequence[Request],
) -> Run:
    """``tuned_on``: what sizes systems of fixed numbers of instances. Raises ``ValueError`` without a request."""
    plant = SYSTEMS[system](fleet, models, knobs, tuned_on).plant(models)
    outcomes = plant.run(requests, SETTLE_S)
    summary = summarize(outcomes, plant.served, plant.at_last_arrival)
    width_s = max((outcomes[-1].arrived_at - outcomes[0].arrived_at) / _NUM_STRETCHES, 1.0)
    return Run(system, summary, plant.samples, ttfts_over_time(outcomes, width_s, _PERCENTS))
