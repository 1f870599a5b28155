"""A day's requests for models on a cluster under a configuration, and what was measured of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchrelay.scheduler.policy.config import PolicyConfig, PoolMode, ScalingMode
from torchrelay.sim.recorded_day import RecordedDay
from torchrelay.sim.scenario import Fleet, Request, ServedModel

_DAY_S = 86_400.0
# CPU time of a coarse simulation, about.
_PER_SECOND, _PER_SECOND_AND_NODE, _PER_REQUEST = 150e-6, 30e-6, 4e-3


@dataclass(frozen=True)
class Workload:
    """``requests``: in order of arrival, the first at 0. ``span_s``: the time over which they came, at least until the
    last arrival of those that count. ``quantized``: models whose weights cannot be quantized once more. ``warm_up_s``:
    of the first requests, which are simulated and do not count. ``scheduled``: models whose minimum is not their
    constant one. ``knows_late_cost``: the configuration's ``late_cost_s`` is the platform's, not a default.
    """

    models: Sequence[ServedModel]
    fleet: Fleet
    requests: Sequence[Request]
    config: PolicyConfig
    span_s: float
    quantized: frozenset[str] = frozenset()
    warm_up_s: float = 0.0
    scheduled: frozenset[str] = frozenset()
    knows_late_cost: bool = True

    @property
    def counted(self) -> Sequence[Request]:
        """The requests after the warm-up."""
        return [request for request in self.requests if request.arrives_at >= self.warm_up_s]

    @property
    def arrivals_s(self) -> float:
        """Time from the end of the warm-up to the last arrival, at least a second."""
        return max(self.requests[-1].arrives_at - self.warm_up_s, 1.0)

    @property
    def requests_per_day(self) -> float:
        return len(self.counted) * _DAY_S / max(self.span_s, 1.0)

    @property
    def simulation_s(self) -> float:
        """CPU time of a simulation, estimated."""
        return _simulation_s(self.fleet, self.warm_up_s + self.arrivals_s, len(self.requests))

    def with_model(self, name: str, **changes: object) -> Workload:
        models = [replace(model, **changes) if model.name == name else model for model in self.models]  # type: ignore[arg-type]
        return replace(self, models=models)


@dataclass(frozen=True)
class Measured:
    """Outcomes by request id, as far as they are known. ``held``: arrival times, rising, and the device
    seconds that instances had held until then.
    """

    attained: Mapping[str, bool] = field(default_factory=dict)
    durations_s: Mapping[str, float] = field(default_factory=dict)
    held: Sequence[tuple[float, float]] = ()

    def held_s(self, begin: float, end: float) -> float:
        """Device seconds that instances held between two arrivals."""
        times = [at for at, _ in self.held]
        return self.held[bisect_right(times, end) - 1][1] - self.held[bisect_left(times, begin)][1]


@dataclass(frozen=True)
class Day:
    """``notes``: what was left out, or cut off. ``weaknesses``: why advice is weak, whatever is simulated."""

    workload: Workload
    measured: Measured
    notes: Sequence[str] = ()
    weaknesses: Sequence[str] = ()


def day_of_log(recorded: RecordedDay) -> Day:
    config = replace(recorded.config, scaling=ScalingMode.ACT, pool_mode=PoolMode.OFF)
    workload = Workload(recorded.models, recorded.fleet, recorded.requests, config, recorded.span_s)
    served = {model.name: model for model in recorded.models}
    attained = {each.request.request_id: each.attains(served[each.request.model]) for each in recorded.outcomes}
    return Day(
        workload, Measured(attained, held=recorded.held), left_out(recorded.without_latency), recorded.differences
    )


def left_out(without_latency: Sequence[str]) -> list[str]:
    if not without_latency:
        return []
    return [f"left out, as no worker has learned how long their steps take: {', '.join(without_latency)}"]


def stretch_of(workload: Workload, limit_s: float) -> tuple[float, Workload]:
    """The longest stretch with most requests whose simulation takes about ``limit_s``, and its begin in the day; the
    whole day if it takes no longer. Where a second takes longer, its first requests. The requests before the stretch,
    as far as they take no longer either, are its warm-up. Its ``requests_per_day`` are its own: see
    ``Workload.span_s``.
    """
    if workload.simulation_s <= limit_s:
        return 0.0, workload
    arrivals = [request.arrives_at for request in workload.requests]
    shortest_s, longest_s = 0.0, arrivals[-1]
    while longest_s - shortest_s > 1.0:
        middle_s = (shortest_s + longest_s) / 2
        first, end = _busiest(arrivals, middle_s)
        fits = _simulation_s(workload.fleet, middle_s, end - first) <= limit_s
        shortest_s, longest_s = (middle_s, longest_s) if fits else (shortest_s, middle_s)
    first, end = _busiest(arrivals, shortest_s or 1.0)
    if not shortest_s:
        end = min(end, first + max(int(limit_s / _PER_REQUEST), 1))
    begin = arrivals[first]
    earliest = next(
        number
        for number, at in enumerate(arrivals)
        if number == first or _simulation_s(workload.fleet, begin - at, first - number) <= limit_s
    )
    start = arrivals[earliest]
    chosen = [replace(each, arrives_at=each.arrives_at - start) for each in workload.requests[earliest:end]]
    return begin, replace(workload, requests=chosen, span_s=max(shortest_s, 1.0), warm_up_s=begin - start)


def _busiest(arrivals: Sequence[float], length_s: float) -> tuple[int, int]:
    """The range of the most arrivals within ``length_s``, the earliest of several."""
    ranges = ((first, bisect_right(arrivals, at + length_s)) for first, at in enumerate(arrivals))
    return max(ranges, key=lambda each: (each[1] - each[0], -each[0]))


def _simulation_s(fleet: Fleet, arrivals_s: float, num_requests: int) -> float:
    num_nodes = fleet.num_hosts * (len(fleet.groups) + 1)
    return arrivals_s * (_PER_SECOND + _PER_SECOND_AND_NODE * num_nodes) + num_requests * _PER_REQUEST
