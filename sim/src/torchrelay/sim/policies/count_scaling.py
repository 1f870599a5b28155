"""Scaling as on serverless platforms: a fixed number of requests per instance, and a fixed idle timeout.

Each instance both prefills and decodes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torchrelay.scheduler.policy.autoscaling.autoscaler_input import (
    Action,
    AutoscalerInput,
    Demand,
    Drain,
    InstanceLoad,
    Load,
)
from torchrelay.scheduler.policy.autoscaling.slot_assignment import SlotAssignment, free_slots
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.types import BOTH, Model, WorkerStatus


@dataclass(frozen=True)
class CountScaling:
    """Scales to ``requests_per_instance`` waiting and open requests. Each model of ``kept`` has an instance from the
    start, which stays unless a model without any needs its slot and no other slot is idle.
    """

    requests_per_instance: int
    kept: Sequence[Model] = ()

    def __call__(
        self, autoscaler_input: AutoscalerInput, config: PolicyConfig, *, is_complete: bool = True
    ) -> tuple[Action, ...]:
        free = free_workers(autoscaler_input)
        actions: list[Action] = []
        starving: list[Model] = []
        for demand in sorted(autoscaler_input.demands, key=lambda demand: -demand.oldest_wait_s):
            num_missing = self._num_missing(demand, autoscaler_input, config)
            loads = _load(demand.model, num_missing, demand.avoid, autoscaler_input, free)
            actions += loads
            if num_missing and not loads and not autoscaler_input.of(demand.model):
                starving.append(demand.model)
        actions += _evictions(starving, autoscaler_input)
        if is_complete and not starving:
            waking = {action.model.version_id for action in actions if isinstance(action, Load)}
            for model in self.kept:
                if model.version_id not in waking and not autoscaler_input.of(model):
                    actions += _load(model, 1, frozenset(), autoscaler_input, free)
        actions += self._idle(autoscaler_input, config, is_complete=is_complete)
        return tuple(actions)

    def _num_missing(self, demand: Demand, autoscaler_input: AutoscalerInput, config: PolicyConfig) -> int:
        if not demand.num_waiting or autoscaler_input.now < demand.not_before:
            return 0
        own = autoscaler_input.of(demand.model)
        num_requests = demand.num_waiting + sum(load.num_open for load in own)
        wanted = math.ceil(num_requests / self.requests_per_instance)
        return max(min(wanted, config.max_instances) - len(own), 0)

    def _idle(self, autoscaler_input: AutoscalerInput, config: PolicyConfig, *, is_complete: bool) -> list[Action]:
        kept = {model.version_id for model in self.kept}
        staying = autoscaler_input.staying if is_complete else autoscaler_input.staying_of_some
        reason = Reason("idle", f"idle for {config.idle_timeout_s:g} s")
        actions: list[Action] = []
        for version_id, loads in staying.items():
            if version_id in autoscaler_input.waited_for:
                continue
            idle = [load for load in loads if _is_idle(load, autoscaler_input.now - config.idle_timeout_s)]
            if version_id in kept and len(idle) == len(loads):
                del idle[0]
            actions += [Drain(load.instance.instance_id, reason) for load in idle]
        return actions


def _load(
    model: Model,
    number: int,
    avoid: frozenset[str],
    autoscaler_input: AutoscalerInput,
    free: dict[str, WorkerStatus],
) -> list[Action]:
    """Wakes up to ``number`` instances in free slots, the nearest copy first."""
    if not number:
        return []
    slots = free_slots(model, free.values(), autoscaler_input.stores, avoid)
    chosen = sorted(slots, key=lambda slot: slot.cost)[:number]
    for slot in chosen:
        del free[slot.worker_id]
    assignments = tuple(SlotAssignment(slot.worker_id, BOTH) for slot in chosen)
    return [Load(model, assignments, Reason("growth", f"{number} more by count"))] if assignments else []


def _is_idle(load: InstanceLoad, since: float) -> bool:
    return load.instance.is_settled and load.is_idle_since(since)


def _evictions(starving: Sequence[Model], autoscaler_input: AutoscalerInput) -> list[Action]:
    """Drains, for each model without an instance, the idle instance that was unused the longest. Slots that are being
    freed count as theirs.
    """
    if not starving:
        return []
    devices = {worker_id: worker.num_devices for worker_id, worker in autoscaler_input.workers.items()}
    loads = [load for load in autoscaler_input.loads if load.instance.worker_id in devices]
    leaving = Counter(devices[load.instance.worker_id] for load in loads if not load.instance.staying)
    idle = sorted(
        (load for load in loads if _is_idle(load, autoscaler_input.now)),
        key=lambda load: (load.unused_since, load.instance.instance_id),
    )
    idle = [load for load in idle if load.instance.version_id not in autoscaler_input.waited_for]
    actions: list[Action] = []
    for model in starving:
        if leaving[model.num_devices]:
            leaving[model.num_devices] -= 1
            continue
        victim = next((load for load in idle if devices[load.instance.worker_id] == model.num_devices), None)
        if victim is not None:
            idle.remove(victim)
            actions.append(Drain(victim.instance.instance_id, Reason("evict", f"{model.name} has no slot")))
    return actions


def free_workers(autoscaler_input: AutoscalerInput) -> dict[str, WorkerStatus]:
    occupied, free = autoscaler_input.cluster_load.occupied_workers, autoscaler_input.free_workers
    return {worker_id: worker for worker_id, worker in free.items() if worker_id not in occupied}
