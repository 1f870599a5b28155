"""A run over time: how many instances there are, who waits, and how long first tokens take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchrelay.sim.scenario import RequestOutcome
from torchrelay.sim.summary import percentile


@dataclass(frozen=True, slots=True)
class Sample:
    """The cluster at a moment, in seconds from the time when requests may arrive."""

    at_s: float
    num_loading: int
    num_ready: int
    num_draining: int
    num_waiting: int  # requests without a first token, wherever they wait for it
    num_decoding: int

    @property
    def num_instances(self) -> int:
        """That hold a slot."""
        return self.num_loading + self.num_ready + self.num_draining


def ttfts_over_time(
    outcomes: Sequence[RequestOutcome], width_s: float, percents: Iterable[int]
) -> list[tuple[float, list[float]]]:
    """For each stretch of time with arrivals: its middle, in seconds from the first arrival, and these percentiles of
    the time to first token of what arrived in it; infinite: refused or unfinished.
    """
    begin = min((outcome.arrived_at for outcome in outcomes), default=0.0)
    of_stretch: dict[int, list[float]] = {}
    for outcome in outcomes:
        of_stretch.setdefault(math.floor((outcome.arrived_at - begin) / width_s), []).append(outcome.ttft_s)
    ordered = sorted(of_stretch.items())
    percents = list(percents)
    return [((number + 0.5) * width_s, [percentile(ttfts, one) for one in percents]) for number, ttfts in ordered]
