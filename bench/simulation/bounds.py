"""Limits of what any scheduler can do in a case, computed in hindsight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bench.simulation.cases import FLEETS, MODELS, WARM_UP_S, Case
from torchrelay.sim.scenario import Fleet, Request, ServedModel

_LATE_COSTS_S = [2.0**power for power in range(-4, 11)]  # device seconds of a late request


class _Needed(NamedTuple):
    """The time in which a request needs an instance at least, if it runs alone and at once, and its own work."""

    begin: float
    end: float
    work_s: float


def hindsight_device_s(case: Case, num_late: int, num_open: int) -> float:
    """Lower bound of the device seconds until the last arrival, with which at most ``num_late`` requests are late and
    ``num_open`` have not ended by then.

    A model takes at least the work of its requests, without the fixed cost of steps, and at least one instance while a
    request that is in time would run alone; loads begin early enough to delay no request, from the RAM of the
    instance's host, and slots are never short. For any cost of a late request, the least total cost minus the cost of
    ``num_late`` bounds the device time from below (weak duality); the greatest of these bounds counts.
    """
    fleet, end = FLEETS[case.fleet], case.requests[-1].arrives_at
    counted = [(request, _needed(request, _model(request), end)) for request in case.counted]
    needed: dict[str, list[_Needed]] = defaultdict(list)
    for request, each in counted:
        needed[request.model].append(each)
    works_s = [_model(request).num_devices * each.work_s for request, each in counted]
    open_s = sum(sorted(works_s, reverse=True)[:num_open])
    least_s = max(
        sum(_least_cost(needed[model.name], model, fleet, cost_s) for model in MODELS) - cost_s * num_late
        for cost_s in _LATE_COSTS_S
    )
    return least_s - open_s


def _needed(request: Request, model: ServedModel, end: float) -> _Needed:
    prompt_s = model.latency.prefill_s(request.num_prompt_tokens)
    answer_s = (request.num_output_tokens - 1) * model.latency.tbt_s(1, request.num_prompt_tokens)
    until = request.arrives_at + prompt_s + answer_s
    work_s = model.latency.prefill.marginal_s(request.num_prompt_tokens, 0)
    work_s += model.latency.decode.marginal_s(request.num_output_tokens - 1, 0)
    return _Needed(request.arrives_at, min(until, end), work_s)


def _least_cost(needed: Sequence[_Needed], model: ServedModel, fleet: Fleet, late_s: float) -> float:
    """Least device seconds plus ``late_s`` per late request: the greater of two bounds, by presence and by work."""
    num_devices = model.num_devices
    load_s = model.pack_bytes / (fleet.device_bytes_per_s * num_devices)
    by_work = num_devices * sum(each.work_s for each in needed)
    # States: the time until which an instance is present, by cost. It is present at the end of the warm-up at no cost.
    states: dict[float, float] = {WARM_UP_S: 0.0}
    for each in needed:
        served: dict[float, float] = {}
        for until, cost in states.items():
            gap_s = max(each.begin - until, 0.0)
            present_until = max(until, each.end)
            present_s = min(gap_s, load_s) + present_until - max(until, each.begin)
            new = cost + num_devices * present_s
            served[present_until] = min(served.get(present_until, new), new)
        for until, cost in states.items():
            served[until] = min(served.get(until, cost + late_s), cost + late_s)
        states = _undominated(served, num_devices)
    return max(min(states.values()), by_work)


def _undominated(states: Mapping[float, float], num_devices: int) -> dict[float, float]:
    """States that no other beats: by presence that lasts longer at no more cost, or that is extended more cheaply."""
    kept: list[tuple[float, float]] = []
    for until, cost in sorted(states.items()):
        if kept and cost >= kept[-1][1] + num_devices * (until - kept[-1][0]):
            continue
        while kept and kept[-1][1] >= cost:
            kept.pop()
        kept.append((until, cost))
    return dict(kept)


def pooled_share_in_time(case: Case) -> float:
    """Share of the requests in time if the slots of each size were one processor of their summed speed, without loads
    and switches: earliest deadline first, and the longest prompt so far is given up as soon as a deadline would be
    missed (Moore-Hodgson). Close to the best possible share, as deadlines nearly follow arrivals.
    """
    fleet = FLEETS[case.fleet]
    num_in_time = 0
    for size in set(fleet.groups):
        prompts = [request for request in case.requests if _model(request).num_devices == size]
        num_in_time += _num_in_time(prompts, fleet.num_hosts * fleet.groups.count(size))
    return num_in_time / len(case.counted)


def _num_in_time(requests: Sequence[Request], num_slots: int) -> int:
    """Counted requests that the pooled slots compute in time."""
    queue: list[tuple[float, float, bool]] = []  # deadline, work left, counts
    now, num_late, num_counted = 0.0, 0, 0
    for request in requests:
        left_s = (request.arrives_at - now) * num_slots
        now = request.arrives_at
        while queue and left_s > 0:
            deadline, work_s, counts = queue[0]
            if work_s > left_s:
                queue[0] = (deadline, work_s - left_s, counts)
                break
            left_s -= work_s
            del queue[0]
        model, counts = _model(request), request.arrives_at >= WARM_UP_S
        work_s = model.latency.prefill.marginal_s(request.num_prompt_tokens, 0)
        queue.append((request.arrives_at + model.ttft_target_s(request.num_prompt_tokens), work_s, counts))
        queue.sort()
        num_counted += counts
        num_late += _give_up(queue, now, num_slots)
    return num_counted - num_late


def _give_up(queue: list[tuple[float, float, bool]], now: float, num_slots: int) -> int:
    """Removes the longest prompts until all others are in time. Returns the number of removed prompts that count."""
    removed = 0
    while True:
        ahead_s, longest = 0.0, 0
        for number, (deadline, work_s, _) in enumerate(queue):
            ahead_s += work_s
            longest = number if work_s > queue[longest][1] else longest
            if now + ahead_s / num_slots > deadline:
                removed += queue.pop(longest)[2]
                break
        else:
            return removed


_BY_NAME = {model.name: model for model in MODELS}


def _model(request: Request) -> ServedModel:
    return _BY_NAME[request.model]
