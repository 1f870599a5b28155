"""Scaling as on serverless platforms: a fixed number of requests per instance, and a fixed idle timeout.

Each instance both prefills and decodes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torchrelay.scheduler.policy.autoscaling.actions import Action, Drain, Load
from torchrelay.scheduler.policy.autoscaling.slots import FreeSlots, SlotAssignment
from torchrelay.scheduler.policy.autoscaling.view import View
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.demand.demand import Demand
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.types import BOTH, Model


@dataclass(frozen=True)
class CountScaling:
    """Scales to ``requests_per_instance`` waiting and open requests. Each model of ``kept`` has an instance from the
    start, which stays unless a model without any needs its slot and no other slot is idle.
    """

    requests_per_instance: int
    kept: Sequence[Model] = ()

    def __call__(self, view: View) -> tuple[Action, ...]:
        free = FreeSlots(view.instances, view.membership)
        actions: list[Action] = []
        starving: list[Model] = []
        for demand in sorted(view.demands, key=lambda demand: -demand.oldest_wait_s):
            num_missing = self._num_missing(demand, view)
            loads = _load(demand.model, num_missing, demand.avoid, free)
            actions += loads
            if num_missing and not loads and not view.of(demand.model):
                starving.append(demand.model)
        actions += _evictions(starving, view)
        if view.is_complete and not starving:
            waking = {action.model.version_id for action in actions if isinstance(action, Load)}
            for model in self.kept:
                if model.version_id not in waking and not view.of(model):
                    actions += _load(model, 1, frozenset(), free)
        actions += self._idle(view)
        return tuple(actions)

    def _num_missing(self, demand: Demand, view: View) -> int:
        if not demand.num_waiting or view.now < demand.not_before:
            return 0
        own = view.of(demand.model)
        num_requests = demand.num_waiting + sum(instance.work.num_open for instance in own)
        wanted = math.ceil(num_requests / self.requests_per_instance)
        return max(min(wanted, view.config.max_instances) - len(own), 0)

    def _idle(self, view: View) -> list[Action]:
        kept, timeout_s = {model.version_id for model in self.kept}, view.config.idle_timeout_s
        reason = Reason("idle", f"idle for {timeout_s:g} s")
        actions: list[Action] = []
        for version_id, instances in view.evaluated.items():
            if version_id in view.waited_for:
                continue
            idle = [instance for instance in instances if _is_idle(instance, view, view.now - timeout_s)]
            if version_id in kept and len(idle) == len(instances):
                del idle[0]
            actions += [Drain(instance.instance_id, reason) for instance in idle]
        return actions


def _load(model: Model, number: int, avoid: frozenset[str], free: FreeSlots) -> list[Action]:
    """Wakes up to ``number`` instances in free slots, the nearest copy first."""
    if not number:
        return []
    slots = free.of(model, avoid)
    chosen = sorted(slots, key=lambda slot: slot.cost)[:number]
    free.take(chosen)
    assignments = tuple(SlotAssignment(slot.worker_id, BOTH) for slot in chosen)
    return [Load(model, assignments, Reason("growth", f"{number} more by count"))] if assignments else []


def _is_idle(instance: Instance, view: View, since: float) -> bool:
    return instance.is_settled and view.is_idle_since(instance, since)


def _evictions(starving: Sequence[Model], view: View) -> list[Action]:
    """Drains, for each model without an instance, the idle instance that was unused the longest. Slots that are being
    freed count as theirs.
    """
    if not starving:
        return []
    devices = {worker_id: worker.num_devices for worker_id, worker in view.membership.workers.items()}
    instances = [instance for instance in view.instances if instance.worker_id in devices]
    leaving = Counter(devices[instance.worker_id] for instance in instances if not instance.staying)
    idle = sorted(
        (instance for instance in instances if _is_idle(instance, view, view.now)),
        key=lambda instance: (instance.unused_since, instance.instance_id),
    )
    idle = [instance for instance in idle if instance.version_id not in view.waited_for]
    actions: list[Action] = []
    for model in starving:
        if leaving[model.num_devices]:
            leaving[model.num_devices] -= 1
            continue
        victim = next((instance for instance in idle if devices[instance.worker_id] == model.num_devices), None)
        if victim is not None:
            idle.remove(victim)
            actions.append(Drain(victim.instance_id, Reason("evict", f"{model.name} has no slot")))
    return actions
