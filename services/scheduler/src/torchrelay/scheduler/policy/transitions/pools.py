"""The targets of all pools, computed from the state; each change is recorded."""

from __future__ import annotations

from collections import Counter, defaultdict

from torchrelay.common.quantities import format_count
from torchrelay.scheduler.policy.autoscaling.pool_target import (
    PoolLoad,
    PoolTarget,
    SlotShortage,
    num_missing_slots,
    pool_target,
)
from torchrelay.scheduler.policy.cluster.storage_tiers import Tier
from torchrelay.scheduler.policy.config import PoolMode
from torchrelay.scheduler.policy.core import Model
from torchrelay.scheduler.policy.effects import SchedulerEvent
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.transitions import demands


def evaluate_pools(state: State, now: float) -> None:
    """Updates ``state.pool_targets``, and records each pool whose target or number of slots changed."""
    if state.config.pool_mode == PoolMode.OFF or now - state.started_at < state.config.settle_s:
        return
    before = state.pool_targets
    state.pool_targets = {load.num_devices: pool_target(load, state.config) for load in _pool_loads(state, now)}
    for num_devices, target in state.pool_targets.items():
        earlier = before.get(num_devices)
        if earlier is None or _numbers(earlier) != _numbers(target):
            state.effects.events.append(_event(target, state.config.pool_mode, now))


def _numbers(target: PoolTarget) -> tuple[int, int]:
    return target.load.num_slots, target.num_wanted


def _event(target: PoolTarget, mode: PoolMode, now: float) -> SchedulerEvent:
    name = f"pool-{target.load.num_devices}"
    wants = "would have" if mode is PoolMode.ADVISE else "wants"
    text = f"{wants} {format_count(target.num_wanted, 'slot')} and has {target.load.num_slots}: {target.reason.text}"
    fields = {"num_devices": target.load.num_devices, **target.reason.fields}
    return SchedulerEvent(now, "pool", "", name, text, "scale.pool", fields)


def _pool_loads(state: State, now: float) -> list[PoolLoad]:
    """The load of each pool that has a slot or that a model needs, the smallest slots first. The pool of single
    devices is there from the start if it has slots without demand.
    """
    shortages = defaultdict[int, list[SlotShortage]](list)
    waiting = dict.fromkeys((*state.queues.versions, *state.minimums.in_force))
    for version_id in waiting:
        model = state.models.get(version_id)
        if model is not None and (number := _num_missing(state, model, now)):
            shortages[model.num_devices].append(SlotShortage(model.name, number))
    num_slots, num_used, num_idle = Counter[int](), Counter[int](), Counter[int]()
    for worker in state.membership.workers.values():
        num_slots[worker.num_devices] += 1
        instance = state.instances.on_worker(worker.worker_id)
        if instance is None:
            continue
        num_used[worker.num_devices] += 1
        is_open = state.attempts.at(instance.instance_id).num_open > 0
        if instance.accepted and not is_open and instance.version_id not in waiting and instance.staying:
            num_idle[worker.num_devices] += 1
    kept = {1} if state.config.pool_min_slots or state.config.pool_spare_slots else set[int]()
    return [
        PoolLoad(size, num_slots[size], num_used[size], num_idle[size], tuple(shortages[size]))
        for size in sorted({*num_slots, *shortages, *kept})
    ]


def _num_missing(state: State, model: Model, now: float) -> int:
    version_id = model.version_id
    demand = demands.demand_of(state, model, state.idle_timeout_s(version_id, now), now)
    instances = [instance for instance in state.instances.of_version(version_id) if instance.staying]
    playing = Counter(role for instance in instances for role in instance.target_roles)
    minimum = state.minimums.in_force.get(version_id)
    tier = Tier.PEER if state.membership.is_held(model.pack_id) else Tier.REMOTE
    load_s = demand.load_s.get(tier, 0.0)
    return num_missing_slots(demand, playing, minimum.number if minimum is not None else 0, load_s, state.config)
