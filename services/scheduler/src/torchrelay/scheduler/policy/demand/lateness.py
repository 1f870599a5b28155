"""Late requests: what a wait counts, and what a model's requests wait for without a slot.

A request that waits for x times its slack (its target for the first token, less its own computation) counts 1 + log x:
being late counts once, and each doubling of the wait adds 0.69. With a weight in proportion to the wait, a queue that
is late already would outweigh requests that are still in time. Requests arrive as a fluid, so all sums are closed
forms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchrelay.scheduler.policy.demand.usage import WINDOW_S


def weight(wait_s: float, slack_s: float) -> float:
    """Late requests that a request counts for if it waits; 0 within its slack."""
    return 1.0 + math.log(wait_s / slack_s) if wait_s > slack_s else 0.0


def nobody(num_waiting: float, arrivals_per_s: float, slack_s: float, away_s: float) -> float:
    """Late requests of a model without an instance for ``away_s``: of those that wait, and of those that come."""
    return num_waiting * weight(away_s, slack_s) + arrivals_per_s * slack_s * _integral(away_s / slack_s)


def displaced(num_waiting: float, arrivals_per_s: float, slack_s: float, away_s: float) -> float:
    """The same, but each request counts at least once: a model that yields its slot as often as its loads allow would
    spend all of its time on them.
    """
    in_time = num_waiting * (away_s <= slack_s) + arrivals_per_s * min(away_s, slack_s)
    return in_time + nobody(num_waiting, arrivals_per_s, slack_s, away_s)


def _integral(x: float) -> float:
    """The integral of ``weight`` from 0 to x, in slacks."""
    return x * math.log(x) if x > 1.0 else 0.0


@dataclass(frozen=True, slots=True)
class Fluid:
    """Prompts, or answers, of a model, as work that arrives and is computed at constant rates.

    backlog_s: work that waits, in seconds of an instance. batch_s: what each instance holds of it without delay: its
    batch of answers; 0 for prompts. load: instances that the arrivals occupy. request_s: work of a request. slack_s:
    how long a request may wait. late_s: cost of a late request, in seconds of a slot. known_s: how long arrivals are
    expected to go on as they are.
    """

    backlog_s: float
    load: float
    request_s: float
    slack_s: float
    late_s: float
    batch_s: float = 0.0
    known_s: float = WINDOW_S

    def late(self, num_instances: int, horizon_s: float, backlog_s: float) -> float:
        """Late requests of those that wait and those that come within ``horizon_s``, each by its place in the queue."""
        if self.request_s <= 0:
            return 0.0
        slacks = num_instances * self.slack_s
        begin = (backlog_s - num_instances * self.batch_s) / slacks
        slope = (self.load - num_instances) / slacks
        waiting = slacks * _integral(begin)
        if abs(slope) * horizon_s < 1e-9:
            arriving = self.load * horizon_s * weight(begin, 1.0)
        else:
            arriving = self.load * (_integral(begin + slope * horizon_s) - _integral(begin)) / slope
        return (waiting + arriving) / self.request_s

    def num_saved(self, num_instances: int, load_s: float) -> float:
        """Late requests that one more instance saves, which is loaded in ``load_s``: while the present rate of arrivals
        is known, or until the queue is computed.
        """
        horizon_s = self._horizon_s(num_instances)
        backlog_s = max(self.backlog_s + (self.load - num_instances) * load_s, 0.0)
        without = self.late(num_instances, horizon_s, backlog_s)
        return max(without - self.late(num_instances + 1, horizon_s, backlog_s), 0.0)

    def held_s(self, num_instances: int, load_s: float) -> float:
        """How long a further instance is held once it is loaded: as long as its queue lasts, and at least as long as
        its next load costs, which a late request begins.
        """
        return max(self._horizon_s(num_instances), load_s + self.late_s)

    def least_saved(self, num_instances: int, load_s: float) -> float:
        """Cost of a further instance, in late requests: its slot during the load and while it is held."""
        return (load_s + self.held_s(num_instances, load_s)) / self.late_s

    def wanted(self, num_instances: int, load_s: float, most: int) -> int:
        """The number up to ``most`` with which instances save most beyond their cost, each beside those before it. All
        are tried: the second may save more than the first.
        """
        best, best_gain, gain = num_instances, 0.0, 0.0
        for number in range(num_instances, most):
            gain += self.num_saved(number, load_s) - self.least_saved(number, load_s)
            if gain >= best_gain:
                best, best_gain = number + 1, gain
        return best

    def _horizon_s(self, num_instances: int) -> float:
        return max(self.known_s, (self.backlog_s - num_instances * self.batch_s) / (num_instances + 1))


def load_cost(load_s: float, arrivals_per_s: float, slack_s: float, late_s: float) -> float:
    """Cost of a load, in seconds of its slot: it takes the slot, the request that begins it waits for all of it, and so
    do those that come meanwhile for a part. ``late_s``: cost of a late request.
    """
    return load_s + late_s * nobody(1.0, arrivals_per_s, slack_s, load_s)
