"""A run over time: numbers of instances and of waiting requests, and times to first token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchrelay.sim.scenario import RequestOutcome
from torchrelay.sim.summary import percentile


@dataclass(frozen=True, slots=True)
class Sample:
    """The cluster at one moment, in seconds from when requests may arrive."""

    at_s: float
    num_loading: int
    num_ready: int
    num_draining: int
    num_waiting: int  # requests without a first token
    num_decoding: int

    @property
    def num_instances(self) -> int:
        """Instances that hold a slot."""
        return self.num_loading + self.num_ready + self.num_draining


def ttfts_over_time(
    outcomes: Sequence[RequestOutcome], width_s: float, percents: Iterable[int]
) -> list[tuple[float, list[float]]]:
    """Percentiles of the time to first token per interval of arrival, with the interval's middle in seconds from the
    first arrival. Intervals without arrivals are left out; a refused or unfinished request counts as infinite.
    """
    begin = min((outcome.arrived_at for outcome in outcomes), default=0.0)
    of_interval: dict[int, list[float]] = {}
    for outcome in outcomes:
        of_interval.setdefault(math.floor((outcome.arrived_at - begin) / width_s), []).append(outcome.ttft_s)
    ordered = sorted(of_interval.items())
    percents = list(percents)
    return [
        ((number + 0.5) * width_s, [percentile(ttfts, percent) for percent in percents]) for number, ttfts in ordered
    ]
