"""DistServe (Zhong et al., OSDI 2024): separate prefill and decode instances in fixed numbers.

Modelled: the numbers of prefill and decode instances that the requests of the tuning half need, on average or in their
busiest ten seconds; all are loaded at the start and stay. The cluster is the same as for all systems. Where it has too
few slots of a size, models get slots in order of their requests per slot; the last model gets the remaining slots in
the same proportion, and a model with fewer than two is not served. Its RAM is not counted realistically. Not modelled:
its search over parallelism (groups of devices are given), and placement that keeps KV within a host. Requests are
placed and bound by our own prediction and wait by deadline (``deadline_order``).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.rivals.deadline_order import by_deadline
from bench.rivals.first_copies import all_everywhere
from bench.rivals.relay_plans import from_disk, no_copies
from torchrelay.scheduler.policy.autoscaling.actions import Action, Load
from torchrelay.scheduler.policy.autoscaling.slots import FreeSlots, SlotAssignment, assign
from torchrelay.scheduler.policy.autoscaling.view import View
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.strategies import LoadingPrompts, Strategies
from torchrelay.scheduler.policy.types import Model, Role
from torchrelay.sim.plant import policy_model
from torchrelay.sim.scenario import Fleet, Request, ServedModel
from torchrelay.sim.setup import Knobs, Setup

_WINDOW_S = 10.0
_USE = 0.7  # of an instance's time, so that prompts wait briefly


@dataclass(frozen=True)
class StaticInstances:
    """Loads ``numbers`` of prefill and decode instances once all ``num_workers`` are present."""

    numbers: Sequence[tuple[Model, int, int]]
    num_workers: int

    def __call__(self, view: View) -> tuple[Action, ...]:
        if not view.is_complete or len(view.membership.workers) < self.num_workers:
            return ()
        free = FreeSlots(view.instances, view.membership)
        actions: list[Action] = []
        for model, num_prefill, num_decode in self.numbers:
            own = view.of(model)
            have = Counter(role for instance in own for role in instance.target_roles)
            wanted = Counter({Role.PREFILL: num_prefill, Role.DECODE: num_decode})
            chosen: list[SlotAssignment] = []
            for role, number in (wanted - have).items():  # instances with a single role
                assigned = assign(Counter({role: number}), free.of(model))
                free.take(assigned)
                chosen += assigned
            actions += [Load(model, tuple(chosen), Reason("growth", "as planned"))] if chosen else []
        return tuple(actions)


def distserve(
    fleet: Fleet, models: Sequence[ServedModel], knobs: Knobs, tuned_on: Sequence[Request], *, is_peak: bool
) -> Setup:
    rates = _rates(tuned_on, is_peak=is_peak)
    wanted = {model: _numbers(model, *rates.get(model.name, (0.0, 0.0)), knobs) for model in models}
    num_requests = Counter(request.model for request in tuned_on)
    numbers = [(policy_model(model), *both) for model, both in fitting(fleet, wanted, num_requests).items()]
    decide = StaticInstances(numbers, fleet.num_hosts * len(fleet.groups))
    large, held = all_everywhere(fleet, models)  # the start does not wait for disks
    strategies = by_deadline(
        Strategies(decide=decide, plan=from_disk, evaluate_packs=no_copies, loading_prompts=LoadingPrompts.KEPT)
    )
    return Setup(knobs.config(), large, strategies, held)


def fitting(
    fleet: Fleet, wanted: Mapping[ServedModel, tuple[int, int]], num_requests: Mapping[str, int]
) -> dict[ServedModel, tuple[int, int]]:
    """Numbers of prefill and decode instances that fit into the slots, models with most requests per slot first."""
    left = Counter({size: fleet.num_hosts * number for size, number in Counter(fleet.groups).items()})
    numbers = {}
    for model in sorted(wanted, key=lambda model: (-num_requests.get(model.name, 0) / sum(wanted[model]), model.name)):
        num_slots = min(sum(wanted[model]), left[model.num_devices])
        if num_slots < 2:
            continue
        share = round(num_slots * wanted[model][0] / sum(wanted[model]))
        num_prefill = min(max(share, 1), num_slots - 1)
        numbers[model] = num_prefill, num_slots - num_prefill
        left[model.num_devices] -= num_slots
    return numbers


def _numbers(model: ServedModel, prompt_rate: float, answer_rate: float, knobs: Knobs) -> tuple[int, int]:
    """Numbers of prefill and decode instances for ``prompt_rate`` and ``answer_rate`` tokens per second."""
    batch = knobs.requests_per_instance
    decode_s = model.latency.tbt_s(batch, 1000 * batch) / batch
    num_prefill = math.ceil(prompt_rate / model.prefill_tokens_per_s / _USE)
    return max(num_prefill, 1), max(math.ceil(answer_rate * decode_s / _USE), 1)


def _rates(requests: Sequence[Request], *, is_peak: bool) -> dict[str, tuple[float, float]]:
    """Tokens of prompts and of answers per second and model, in the busiest window or over the whole time."""
    if not requests:
        return {}
    end = max(request.arrives_at for request in requests)
    width = _WINDOW_S if is_peak else max(end, _WINDOW_S)
    tokens: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for request in requests:
        of_window = tokens[request.model][min(int(request.arrives_at / width), int(end / width) if is_peak else 0)]
        of_window[0] += request.num_prompt_tokens
        of_window[1] += request.num_output_tokens
    return {
        model: (max(num for num, _ in windows.values()) / width, max(num for _, num in windows.values()) / width)
        for model, windows in tokens.items()
    }
