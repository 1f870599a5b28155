"""Savings of changes by simulation, and how far the simulation of the settings as they are is off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from torchrelay.scheduler.policy.policy import Policy
from torchrelay.sim.advice.changes import Change
from torchrelay.sim.advice.workload import Measured, Workload
from torchrelay.sim.plant import START_S, Plant
from torchrelay.sim.setup import one_copy_each
from torchrelay.sim.summary import Summary, percentile, summarize

MOST_LOST: Final = 0.005  # of the attained share, that a change may lower
ATTAINED, DEVICE_S, DURATION = "attained", "device seconds", "time of an answer, P50"  # figures that are compared
_MOST_OFF = 0.25  # of a measured figure, above which advice is weak
_LEAST_SAVED = 0.01  # dollars a day
_NUM_SHOWN = 3
_SETTLE_S = 30.0


@dataclass(frozen=True, slots=True)
class DayPrices:
    """Dollars. ``pays_held``: a device costs while an instance holds it; otherwise as long as its host is there."""

    device_hour: float = 2.5
    ram_gb_hour: float = 0.005
    late_request: float = 0.01
    pays_held: bool = False


@dataclass(frozen=True)
class Result:
    """A simulated workload. ``late``: late first tokens by model. ``duration_p50_s``: of answers."""

    summary: Summary
    late: Mapping[str, int]
    duration_p50_s: float

    def cost_per_day(self, workload: Workload, requests_per_day: float, prices: DayPrices) -> float:
        """``workload``: that was simulated. ``requests_per_day``: also those that were not simulated."""
        summary, passed_s = self.summary, workload.arrivals_s
        num_devices = summary.device_s / passed_s if prices.pays_held else workload.fleet.num_devices
        ram_gb = summary.ram_byte_s / passed_s / 1e9
        num_late = (1 - summary.attainment) * requests_per_day
        hourly = num_devices * prices.device_hour + ram_gb * prices.ram_gb_hour
        return 24 * hourly + num_late * prices.late_request


@dataclass(frozen=True)
class Check:
    """A figure of the settings as they are."""

    name: str
    measured: float
    simulated: float

    @property
    def off(self) -> float:
        """Share of what was measured by which the simulation is off."""
        return abs(self.simulated - self.measured) / max(self.measured, 1e-9)

    @property
    def is_weak(self) -> bool:
        return self.off > _MOST_OFF


@dataclass(frozen=True)
class Saving:
    """A change, and what it saves each day."""

    change: Change
    saved: float
    attained: float
    attained_before: float


def simulate(workload: Workload) -> Result:
    """Runs the scheduler's own policy."""
    ids = count()
    policy = Policy(workload.config, lambda: f"instance-{next(ids)}", START_S)
    held = one_copy_each(workload.fleet, workload.models)
    plant = Plant(policy, workload.fleet, workload.models, held=held, is_coarse=True)
    outcomes = plant.run(workload.requests, _SETTLE_S, warm_up_s=workload.warm_up_s)
    late = Counter(
        outcome.request.model
        for outcome in outcomes
        if outcome.ttft_s > plant.served[outcome.request.model].ttft_target_s(outcome.request.num_prompt_tokens)
    )
    durations = [outcome.ended_at - outcome.arrived_at for outcome in outcomes if outcome.ended_at]
    summary = summarize(outcomes, plant.served, plant.at_last_arrival)
    return Result(summary, late, percentile(durations, 50) if durations else 0.0)


def checks_of(measured: Measured, begin: float, workload: Workload, simulated: Result) -> list[Check]:
    """The figures of a stretch that were measured. ``begin``: of the stretch in the day."""
    names, checks = [request.request_id for request in workload.counted], []
    if attained := [measured.attained[name] for name in names if name in measured.attained]:
        checks.append(Check(ATTAINED, sum(attained) / len(attained), simulated.summary.attainment))
    if measured.held:
        held_s = measured.held_s(begin, begin - workload.warm_up_s + workload.requests[-1].arrives_at)
        checks.append(Check(DEVICE_S, held_s, simulated.summary.device_s))
    if durations := [measured.durations_s[name] for name in names if name in measured.durations_s]:
        checks.append(Check(DURATION, percentile(durations, 50), simulated.duration_p50_s))
    return checks


def best_savings(
    base: tuple[Workload, Result],
    changed: Iterable[tuple[Change, Result]],
    requests_per_day: float,
    prices: DayPrices,
) -> Sequence[Saving]:
    """The changes that save most, without those that make many more requests late."""
    before, attained = base[1].cost_per_day(base[0], requests_per_day, prices), base[1].summary.attainment
    savings = [
        Saving(
            change,
            before - result.cost_per_day(change.workload, requests_per_day, prices),
            result.summary.attainment,
            attained,
        )
        for change, result in changed
    ]
    kept = [each for each in savings if each.saved >= _LEAST_SAVED and each.attained >= attained - MOST_LOST]
    return sorted(kept, key=lambda each: (-each.saved, each.change.title))[:_NUM_SHOWN]
