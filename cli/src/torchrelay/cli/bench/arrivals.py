"""The arrivals of an open load: times that do not depend on the platform. Pure, but for the trace's file."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count, islice, repeat, takewhile

from torchrelay.cli.bench.workload import Scenario, Workload
from torchrelay.sim.traces import Arrival, read_trace

OPEN = (Scenario.SERVER, Scenario.OFFLINE, Scenario.BURST, Scenario.TRACE)


def arrivals_of(load: Workload) -> list[Arrival]:
    """The requests of an open load by time, in seconds from its begin.

    Raises ``ValueError`` for a trace that is not in the format.
    """
    if load.scenario == Scenario.TRACE:
        assert load.trace is not None
        arrivals: Iterator[Arrival] = iter(_capped(load, read_trace(load.trace)))
    else:
        arrivals = (Arrival(at, load.num_prompt, load.num_answer) for at in _times(load))
    if load.seconds is not None:
        end_s = load.seconds
        arrivals = takewhile(lambda arrival: arrival.at < end_s, arrivals)
    return list(islice(arrivals, load.num_requests))


def _capped(load: Workload, arrivals: list[Arrival]) -> list[Arrival]:
    """The arrivals with the lengths of the load at most; 0: as they are."""
    return [
        Arrival(
            each.at,
            min(each.num_prompt_tokens, load.num_prompt or each.num_prompt_tokens),
            min(each.num_output_tokens, load.num_answer or each.num_output_tokens),
        )
        for each in arrivals
    ]


def _times(load: Workload) -> Iterator[float]:
    match load.scenario:
        case Scenario.SERVER:
            yield from _poisson(load.rate, random.Random(load.seed))
        case Scenario.BURST:
            for number in count(1):  # the first is after a quiet time, too
                yield from repeat(number * load.every_s, load.at_once)
        case _:
            yield from repeat(0.0)


def _poisson(rate: float, random_: random.Random) -> Iterator[float]:
    at = 0.0
    while True:
        at += random_.expovariate(rate)
        yield at
