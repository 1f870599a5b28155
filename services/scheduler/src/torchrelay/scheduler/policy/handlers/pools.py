"""Number of slots that each pool should have, and why; each change is recorded."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torchrelay.common.quantities import format_count
from torchrelay.scheduler.policy.autoscaling.growth import wanted_instances
from torchrelay.scheduler.policy.config import PolicyConfig, PoolMode
from torchrelay.scheduler.policy.demand.demand import Demand
from torchrelay.scheduler.policy.effects import SchedulerEvent
from torchrelay.scheduler.policy.handlers import demands
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.storage_tiers import Tier
from torchrelay.scheduler.policy.types import ROLES, Model, Pool, PoolTarget, Role, SlotClass

_SEEN_S = 600.0  # until an empty pool may have got workers of another engine
_MAX_NAMES = 3  # of models, in a reason

_Shortages = Sequence[tuple[str, int]]  # models that need more slots than they hold, with the number that they lack


def evaluate_pools(state: State, now: float) -> None:
    """Updates the targets of all pools, and records each pool whose target or number of slots changed."""
    if not _is_on(state, now):
        return
    before, state.pool_targets = _numbers(state), _targets(state, now)
    state.pools_evaluated_at = now
    num_slots = state.pool_targets.get(Pool(1), PoolTarget()).num_slots
    state.slot_starts.observe(num_slots, is_starting_slots(state, 1), now)
    for pool, numbers in _numbers(state).items():
        if before.get(pool) != numbers:
            _record(state, pool, now)


def _numbers(state: State) -> dict[Pool, tuple[int, int]]:
    """The numbers of slots of all workers that pools have and should have."""
    targets = state.pool_targets.items()
    return {pool: (target.num_slots, target.num_wanted) for pool, target in targets if pool.role is None}


def request_waits(state: State, model: Model, now: float) -> None:
    """Raises the targets at once if a request waits for a pool that should have no slot, and whose slots have its
    engine: a launcher learns of the first request without waiting for the next evaluation, which may raise them
    further.
    """
    pools, known = [Pool(model.num_devices, role) for role in (None, *ROLES)], state.pool_targets
    if known.get(pools[0], PoolTarget()).num_wanted or not state.queues.num_waiting(model.version_id):
        return
    if not _is_on(state, now) or not _suits_slots(state, model, now):
        return
    shortages = ((model.name, 1),)  # without a slot in use no role is played
    raised = {pool: pool_target(known.get(pool, PoolTarget()), shortages, state.config) for pool in pools}
    state.pool_targets, state.pools_evaluated_at = {**known, **raised}, now
    _record(state, pools[0], now)


def is_starting_slots(state: State, num_devices: int) -> bool:
    """Whether a launcher starts slots of this pool. Launchers start only slots of one device."""
    if state.config.pool_mode is not PoolMode.FOLLOW or num_devices != 1:
        return False
    whole, *of_roles = (state.pool_targets.get(Pool(1, role), PoolTarget()) for role in (None, *ROLES))
    are_apart = any(target.num_slots for target in of_roles)  # workers are set apart for a role
    return any(target.num_wanted > target.num_slots for target in (whole, *(of_roles if are_apart else ())))


def _is_on(state: State, now: float) -> bool:
    """Whether targets are computed: in the settling time of a start, not all slots are known."""
    return state.config.pool_mode is not PoolMode.OFF and now - state.started_at >= state.config.settle_s


def _suits_slots(state: State, model: Model, now: float) -> bool:
    """Whether slots of the model's pool have its engine and labels, and memory for it, if any were seen lately."""
    sizes, begin = state.membership.sizes, now - _SEEN_S
    if not sizes.since(begin, SlotClass(model.num_devices)):
        return True
    fitting = (size.slot_class.weights_bytes for size in sizes.since(begin, model.slot_class))
    return any(not 0 < weights_bytes < model.pack_bytes for weights_bytes in fitting)


def _record(state: State, pool: Pool, now: float) -> None:
    target, name = state.pool_targets[pool], f"pool-{pool.num_devices}"
    wants = "would have" if state.config.pool_mode is PoolMode.ADVISE else "wants"
    text = f"{wants} {format_count(target.num_wanted, 'slot')} and has {target.num_slots}: {target.reason.text}"
    fields = {"num_devices": pool.num_devices, **target.reason.fields}
    state.effects.events.append(SchedulerEvent(now, "pool", "", name, text, "scale.pool", fields))


def _targets(state: State, now: float) -> dict[Pool, PoolTarget]:
    """The targets of all pools that have a slot or that a model needs, the smallest slots first. The pools of single
    devices are there from the start if they have slots without demand.
    """
    wanting = dict.fromkeys((*state.queues.versions, *state.minimums.in_force))
    answering = (instance.version_id for instance in state.instances if not instance.work.is_idle)
    shortages = _shortages(state, dict.fromkeys((*wanting, *answering)), now)
    num_slots, num_used, num_idle = Counter[Pool](), Counter[Pool](), Counter[Pool]()
    for worker in state.membership.workers.values():
        pools = [Pool(worker.num_devices)]
        if len(worker.playable_roles) == 1:
            pools += [Pool(worker.num_devices, role) for role in worker.playable_roles]
        num_slots.update(pools)
        instance = state.instances.on_worker(worker.worker_id)
        if instance is None:
            continue
        num_used.update(pools)
        if instance.accepted and instance.work.is_idle and instance.version_id not in wanting and instance.staying:
            num_idle.update(pools)
    is_kept = state.config.pool_min_slots or state.config.pool_spare_slots
    kept = [Pool(1, role) for role in (None, *ROLES)] if is_kept else []
    return {
        pool: pool_target(
            PoolTarget(num_slots[pool], num_used[pool], num_idle[pool]), shortages.get(pool, ()), state.config
        )
        for pool in sorted({*num_slots, *shortages, *kept}, key=lambda pool: (pool.num_devices, pool.role or 0))
    }


def _shortages(state: State, version_ids: Iterable[str], now: float) -> Mapping[Pool, _Shortages]:
    """The models among ``version_ids`` that lack slots, by the pool that lacks them."""
    shortages = defaultdict[Pool, list[tuple[str, int]]](list)
    for version_id in version_ids:
        model = state.versions.model(version_id)
        if model is None or not _suits_slots(state, model, now):
            continue
        demand = demands.demand_of(state, model, now)
        missing = _missing_roles(state, demand)
        # Each new slot plays both roles, unless these are sized apart.
        number = missing.total() if demand.decode is not None else max(missing.values(), default=0)
        if number:
            shortages[Pool(model.num_devices)].append((model.name, number))
        for role, num_missing in missing.items():
            shortages[Pool(model.num_devices, role)].append((model.name, num_missing))
    return shortages


def _missing_roles(state: State, demand: Demand) -> Counter[Role]:
    """Instances that the model lacks, by role."""
    model, minimum = demand.model, state.minimums.in_force.get(demand.model.version_id)
    instances = [instance for instance in state.instances.of_version(model.version_id) if instance.staying]
    playing = Counter(role for instance in instances for role in instance.target_roles)
    wanted = Counter(dict.fromkeys(ROLES, int(demand.num_waiting > 0)))
    if all(playing[role] for role in ROLES):
        load_s = demand.load_s.get(Tier.PEER if state.membership.is_held(model.pack_id) else Tier.REMOTE, 0.0)
        wanted = wanted_instances(demand, playing, load_s, state.config)
    least = minimum.number if minimum is not None else 0
    return +Counter({role: max(least, wanted[role]) - playing[role] for role in ROLES})


def pool_target(known: PoolTarget, shortages: _Shortages, config: PolicyConfig) -> PoolTarget:
    """The slots in use, those that models lack beyond the idle ones, and the spare ones, within the limits."""
    num_short = sum(number for _, number in shortages)
    num_new = max(num_short - known.num_idle, 0)
    needed = known.num_used + num_new + config.pool_spare_slots
    wanted = max(config.pool_min_slots, min(needed, config.pool_max_slots or needed))
    parts = [f"{known.num_used} in use"]
    if num_new:
        num_more = len(shortages) - _MAX_NAMES
        names = ", ".join(name for name, _ in shortages[:_MAX_NAMES])
        parts.append(f"{num_new} for {names} and {num_more} more" if num_more > 0 else f"{num_new} for {names}")
    if config.pool_spare_slots:
        parts.append(f"{config.pool_spare_slots} spare")
    text, cause = f"{format_count(needed, 'slot')} needed: {', '.join(parts)}", "pool_demand"
    if wanted != needed:
        cause, limit = ("pool_min", "minimum") if wanted > needed else ("pool_max", "maximum")
        text += f"; the pool's {limit} is {wanted}"
    figures = {"num_slots": known.num_slots, "num_wanted": wanted, "num_used": known.num_used, "num_short": num_short}
    return replace(known, num_wanted=wanted, reason=Reason(cause, text, figures))
