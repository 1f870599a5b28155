"""The common price of all decisions about slots: late requests against seconds of a slot.

A late request costs ``late_s`` seconds of a slot: the operator's setting ``late_cost_s``, in device seconds, divided by
the devices of the slot. All else follows. The formulas are fluid approximations, which count work in seconds of one
instance.
"""

from __future__ import annotations

import math


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


def held_s(num_instances: int, backlog_s: float, load_s: float, late_s: float) -> float:
    """Time that one more instance, loaded in ``load_s``, is expected to be held: until the present queue is computed,
    and at least as long as a late request is worth.
    """
    return max(late_s, load_s + backlog_s / (num_instances + 1))


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
