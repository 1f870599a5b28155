"""The same requests under two policies: J = device seconds + 60 x late requests, and its relative changes by case."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.simulation.cases import FLEETS, MODELS, Case, outcome_of
from torchrelay.scheduler.policy.strategies import Strategies
from torchrelay.sim.policies.setup import Knobs, ours

LATE_S = 60.0  # device seconds of a late request: the default price (``idle_timeout_s``)
# Two-sided 95% quantiles of Student's t, by degrees of freedom.
T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 11: 2.20, 15: 2.13, 19: 2.09}


def cost_of(case: Case, strategies: Strategies) -> float:
    """J of the case."""
    setup = replace(ours(FLEETS[case.fleet], MODELS, Knobs(LATE_S), case.requests), strategies=strategies)
    outcome = outcome_of(case, setup)
    return outcome.device_s + LATE_S * outcome.num_late


@dataclass(frozen=True)
class Changes:
    """dJ: relative changes of J, by case."""

    values: Sequence[float]

    @classmethod
    def between(cls, before: Sequence[float], after: Sequence[float]) -> Changes:
        """Changes between costs of the same cases."""
        return cls([new / old - 1 for old, new in zip(before, after, strict=True)])

    @property
    def mean(self) -> float:
        return statistics.mean(self.values)

    @property
    def half_width(self) -> float:
        """Half of the 95% interval of the mean."""
        number = len(self.values)
        if number < 2:
            return math.inf
        quantile = T95[max(freedom for freedom in T95 if freedom <= number - 1)]
        return quantile * statistics.stdev(self.values) / math.sqrt(number)

    def __str__(self) -> str:
        return f"dJ {self.mean:+7.2%} +- {self.half_width:6.2%}"
