"""The targets of all pools, computed from the state; each change is recorded."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torchrelay.common.quantities import format_count
from torchrelay.scheduler.policy.autoscaling.autoscaler_input import Demand
from torchrelay.scheduler.policy.autoscaling.pool_target import (
    PoolLoad,
    PoolTarget,
    SlotShortage,
    missing_roles,
    num_missing_slots,
    pool_target,
)
from torchrelay.scheduler.policy.cluster.storage_tiers import Tier
from torchrelay.scheduler.policy.config import PoolMode
from torchrelay.scheduler.policy.effects import SchedulerEvent
from torchrelay.scheduler.policy.handlers import demands
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.types import ROLES, Model, Role, SlotClass

_SEEN_S = 600.0  # until an empty pool may have got workers of another engine


def request_waits(state: State, model: Model, now: float) -> None:
    """Raises the targets at once if a request waits for a pool that should have no slot, and whose slots have its
    engine: a launcher learns of the first request without waiting for the next evaluation, which may raise them
    further.
    """
    target = state.pool_targets.get(model.num_devices)
    if (target is not None and target.num_wanted) or not state.queues.num_waiting(model.version_id):
        return
    if not _is_on(state, now) or not _has_engine(state, model, now):
        return
    shortages = (SlotShortage(model.name, 1),)  # without a slot in use no role is played
    known = target.load if target is not None else PoolLoad(model.num_devices)
    raised = pool_target(replace(known, shortages=shortages), state.config)
    state.pool_targets = {**state.pool_targets, model.num_devices: raised}
    for role in ROLES:
        of_role = state.role_targets.get((model.num_devices, role))
        known = of_role.load if of_role is not None else PoolLoad(model.num_devices, role=role)
        state.role_targets[model.num_devices, role] = pool_target(replace(known, shortages=shortages), state.config)
    state.pools_evaluated_at = now
    state.effects.events.append(_event(raised, state.config.pool_mode, now))


def _is_on(state: State, now: float) -> bool:
    """Whether targets are computed: in the settling time of a start, not all slots are known."""
    return state.config.pool_mode is not PoolMode.OFF and now - state.started_at >= state.config.settle_s


def _has_engine(state: State, model: Model, now: float) -> bool:
    """Whether the slots of the model's pool have its engine, as far as any slots were seen lately."""
    seen = state.membership.sizes.since(now - _SEEN_S, SlotClass(model.num_devices))
    return not seen or any(model.slot_class.fits(size.slot_class) for size in seen)


def evaluate_pools(state: State, now: float) -> None:
    """Updates the targets of all pools, and records each pool whose target or number of slots changed."""
    if not _is_on(state, now):
        return
    before = state.pool_targets
    targets = [pool_target(load, state.config) for load in _pool_loads(state, now)]
    state.pool_targets = {target.load.num_devices: target for target in targets if target.load.role is None}
    state.role_targets = {(target.load.num_devices, role): target for target in targets if (role := target.load.role)}
    state.pools_evaluated_at = now
    single = state.pool_targets.get(1)
    state.slot_starts.observe(0 if single is None else single.load.num_slots, state.is_starting_slots(1), now)
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


_Pool = tuple[int, Role | None]  # devices of a slot; the role of workers that can play no other, None: of all workers


def _pool_loads(state: State, now: float) -> list[PoolLoad]:
    """The load of each pool that has a slot or that a model needs, the smallest slots first. The pools of single
    devices are there from the start if they have slots without demand.
    """
    wanting = dict.fromkeys((*state.queues.versions, *state.minimums.in_force))
    working = (state.instances.get(instance_id) for instance_id in state.attempts.work)
    answering = (instance.version_id for instance in working if instance is not None)
    shortages = _shortages(state, dict.fromkeys((*wanting, *answering)), now)
    num_slots, num_used, num_idle = Counter[_Pool](), Counter[_Pool](), Counter[_Pool]()
    for worker in state.membership.workers.values():
        pools: list[_Pool] = [(worker.num_devices, None)]
        if len(worker.playable_roles) == 1:
            pools += [(worker.num_devices, role) for role in worker.playable_roles]
        num_slots.update(pools)
        instance = state.instances.on_worker(worker.worker_id)
        if instance is None:
            continue
        num_used.update(pools)
        is_open = state.attempts.at(instance.instance_id).num_open > 0
        if instance.accepted and not is_open and instance.version_id not in wanting and instance.staying:
            num_idle.update(pools)
    kept: list[_Pool] = []
    if state.config.pool_min_slots or state.config.pool_spare_slots:
        kept = [(1, role) for role in (None, *ROLES)]
    pools = sorted({*num_slots, *shortages, *kept}, key=lambda pool: (pool[0], pool[1] or 0))
    return [
        PoolLoad(pool[0], num_slots[pool], num_used[pool], num_idle[pool], tuple(shortages.get(pool, ())), pool[1])
        for pool in pools
    ]


def _shortages(state: State, version_ids: Iterable[str], now: float) -> Mapping[_Pool, Sequence[SlotShortage]]:
    """The models among ``version_ids`` that lack slots, by the pool that lacks them."""
    shortages = defaultdict[_Pool, list[SlotShortage]](list)
    for version_id in version_ids:
        model = state.models.get(version_id)
        if model is None or not _has_engine(state, model, now):
            continue
        demand = demands.demand_of(state, model, now)
        missing = _missing(state, model, demand)
        if number := num_missing_slots(demand, missing):
            shortages[model.num_devices, None].append(SlotShortage(model.name, number))
        for role, number in missing.items():
            shortages[model.num_devices, role].append(SlotShortage(model.name, number))
    return shortages


def _missing(state: State, model: Model, demand: Demand) -> Counter[Role]:
    version_id = model.version_id
    instances = [instance for instance in state.instances.of_version(version_id) if instance.staying]
    playing = Counter(role for instance in instances for role in instance.target_roles)
    minimum = state.minimums.in_force.get(version_id)
    tier = Tier.PEER if state.membership.is_held(model.pack_id) else Tier.REMOTE
    load_s = demand.load_s.get(tier, 0.0)
    return missing_roles(demand, playing, minimum.number if minimum is not None else 0, load_s, state.config)
