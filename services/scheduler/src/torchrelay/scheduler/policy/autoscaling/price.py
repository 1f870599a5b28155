"""The common price of all decisions about slots: late requests against seconds of a slot.

A cold start is worth ``price_s`` seconds of its slot: the operator's setting for one device, divided by the devices of
the slot, or the model's own setting. A late request costs ``late_s``, a multiple of it. All else follows. The formulas
are fluid approximations, which count work in seconds of one instance.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

_NUM_GAPS = 64
_MIN_GAPS = 8  # with fewer, the break-even time is used
_LEAST_IDLE_S = 1.0


def lateness(num_instances: int, backlog_s: float, load: float, target_s: float, horizon_s: float) -> float:
    """Integral over ``horizon_s`` of the work beyond what is computed within the target (s^2).

    ``load``: work that arrives per second. The queue changes by load - instances per second.
    """
    begin = backlog_s - num_instances * target_s
    slope = load - num_instances
    end = begin + slope * horizon_s
    if begin <= 0 >= end:
        return 0.0
    if begin >= 0 <= end:
        return (begin + end) / 2 * horizon_s
    return max(begin, end) ** 2 / (2 * abs(slope))


def num_saved(
    num_instances: int,
    backlog_s: float,
    load: float,
    request_s: float,
    target_s: float,
    load_s: float,
    horizon_s: float,
) -> float:
    """Late requests until ``horizon_s`` that one more instance saves, which is loaded in ``load_s``; a request that is
    late by several targets counts several times. ``request_s``: mean work per request.
    """
    left_s = horizon_s - load_s
    if left_s <= 0 or request_s <= 0:
        return 0.0
    backlog_s = max(backlog_s + (load - num_instances) * load_s, 0.0)
    without = lateness(num_instances, backlog_s, load, target_s, left_s)
    return (without - lateness(num_instances + 1, backlog_s, load, target_s, left_s)) / (request_s * target_s)


def held_s(num_instances: int, backlog_s: float, load_s: float, price_s: float) -> float:
    """Time that one more instance, loaded in ``load_s``, is expected to be held: until the present queue is computed,
    and at least as long as a cold start is worth.
    """
    return max(price_s, load_s + backlog_s / (num_instances + 1))


def least_saved(load_s: float, held_s: float, late_s: float) -> float:
    """Late requests that an instance must save to pay for its slot, during the load and while it is held."""
    return (load_s + held_s) / late_s


def lateness_weight(wait_s: float, target_s: float) -> float:
    """Weight of a late request: 1, plus a logarithm of its wait. With a weight in proportion to the wait, a queue that
    is late already would outweigh requests that are still in time.
    """
    return 1.0 + math.log1p(wait_s / target_s)


def num_lost(arrivals_per_s: float, away_s: float, target_s: float) -> float:
    """Late requests of a model without its slot for ``away_s``, weighted by ``lateness_weight``: a request that arrives
    meanwhile waits half of that on average. Requests that wait already are late in any case.
    """
    return arrivals_per_s * away_s * lateness_weight(away_s / 2, target_s)


def load_cost(load_s: float, arrivals_per_s: float, target_s: float, late_s: float) -> float:
    """Cost of a load, in seconds of its slot: it takes the slot, and requests that arrive until its end are late."""
    late = num_lost(arrivals_per_s, load_s, target_s)
    if load_s > target_s:
        late += lateness_weight(load_s, target_s)  # the request that loads it waits for all of it
    return load_s + late_s * late


def num_gained(arrivals_per_s: float, num_waiting: float, held_s: float) -> float:
    """Requests of a model that a slot serves in ``held_s``. A waiting request counts once, however long it waited."""
    return num_waiting + arrivals_per_s * held_s


def least_keep_s(gaps_s: Sequence[float], break_even_s: float) -> float:
    """The time to keep an idle slot that would have cost least in these gaps, at most the break-even time (ski rental).
    A gap within that time costs its own length, a longer gap costs the time kept plus the break-even time.
    """
    ordered = sorted(gaps_s)
    best_s, least = break_even_s, sum(gap if gap <= break_even_s else 2 * break_even_s for gap in ordered)
    shorter_s = 0.0
    for number, gap in enumerate([0.0, *ordered]):
        if gap > break_even_s:
            break
        shorter_s += gap
        cost = shorter_s + (len(ordered) - number) * (gap + break_even_s)
        if cost < least:
            best_s, least = gap, cost
    return best_s


@dataclass(frozen=True, slots=True)
class IdlePlan:
    """Plan for the slot of an unused model, in seconds since the last use: it is kept until ``keep_s``, loaded again at
    ``wake_s`` before the next request, and kept until ``until_s``.
    """

    keep_s: float
    wake_s: float = math.inf
    until_s: float = math.inf

    def cost(self, gap_s: float, break_even_s: float) -> float:
        """Cost of a gap in seconds of a slot; a cold start is worth ``break_even_s``."""
        if gap_s <= self.keep_s:
            return gap_s
        if gap_s < self.wake_s:
            return self.keep_s + break_even_s
        if gap_s <= self.until_s:
            return self.keep_s + gap_s - self.wake_s
        return self.keep_s + self.until_s - self.wake_s + break_even_s


def least_plan(gaps_s: Sequence[float], break_even_s: float, load_s: float) -> IdlePlan:
    """The plan that would have cost least in these gaps: the slot is kept for ``least_keep_s``, or for no time, and
    loaded before the end of longer gaps, if enough of them are alike. It is released for at least as long as a cold
    start is worth, and held before its use for at most that time.

    After M. Shahrad et al., "Serverless in the Wild" (USENIX ATC 2020): a histogram of idle times gives the time to
    load before the next request, and how long to stay.
    """
    kept = IdlePlan(least_keep_s(gaps_s, break_even_s))
    plans = [kept, *(_with_load(gaps_s, keep_s, break_even_s, load_s) for keep_s in sorted({0.0, kept.keep_s}))]
    return min(plans, key=lambda plan: sum(plan.cost(gap_s, break_even_s) for gap_s in gaps_s))


def _with_load(gaps_s: Sequence[float], keep_s: float, break_even_s: float, load_s: float) -> IdlePlan:
    """The plan with the best time to load again; without one if few gaps are longer than ``keep_s``."""
    longer = sorted(gap_s for gap_s in gaps_s if gap_s > keep_s)
    best = IdlePlan(keep_s)
    if len(longer) < _MIN_GAPS:
        return best
    least = len(longer) * break_even_s
    for first, earliest_s in enumerate(longer):
        wake_s, held_s = earliest_s - load_s, 0.0
        if wake_s < keep_s + break_even_s:
            continue
        for last in range(first, len(longer)):
            if longer[last] - wake_s > break_even_s:
                break
            held_s += longer[last] - wake_s
            num_later = len(longer) - 1 - last
            cost = held_s + num_later * (longer[last] - wake_s) + (first + num_later) * break_even_s
            if cost < least and last - first + 1 >= _MIN_GAPS:
                best, least = IdlePlan(keep_s, wake_s, longer[last]), cost
    return best


@dataclass(slots=True)
class IdleGaps:
    """Recent gaps between uses of a model, and what each cost under the plan at that time."""

    _gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_GAPS))
    _paid_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_GAPS))
    _plans: dict[tuple[float, float], IdlePlan] = field(default_factory=dict)  # the last one, until the next gap

    def add(self, gap_s: float, break_even_s: float, load_s: float) -> None:
        paid_s = self.plan(break_even_s, load_s).cost(gap_s, break_even_s)
        self._plans.clear()
        self._gaps_s.append(gap_s)
        self._paid_s.append(paid_s)

    def return_s(self, idle_s: float) -> float:
        """Expected seconds until the next use of a model that has been unused for ``idle_s``: the mean time left of the
        longer gaps, and of one more gap that lasts as long again.
        """
        left_s = [gap_s - idle_s for gap_s in self._gaps_s if gap_s > idle_s]
        return (max(idle_s, _LEAST_IDLE_S) + sum(left_s)) / (1 + len(left_s))

    def plan(self, break_even_s: float, load_s: float) -> IdlePlan:
        """The plan for an idle slot. Its cost over the remembered gaps is at most twice that of an optimal plan,
        plus two cold starts: above twice, the slot is kept for the break-even time, with which no gap costs more than
        twice.
        """
        if len(self._gaps_s) < _MIN_GAPS:
            return IdlePlan(break_even_s)
        asked = (break_even_s, load_s)
        if asked not in self._plans:
            known_s = sum(min(gap, break_even_s) for gap in self._gaps_s)
            is_costly = sum(self._paid_s) > 2 * known_s
            plan = IdlePlan(break_even_s) if is_costly else least_plan(self._gaps_s, break_even_s, load_s)
            self._plans = {asked: plan}
        return self._plans[asked]
