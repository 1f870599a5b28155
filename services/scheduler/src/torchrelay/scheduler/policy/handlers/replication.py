"""Runs the replicator on the state, and turns its decisions into commands with reasons."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from torchrelay.scheduler.policy.autoscaling.lateness import load_cost
from torchrelay.scheduler.policy.autoscaling.usage import Usage
from torchrelay.scheduler.policy.effects import CopyCommand, Hop, RetainCommand
from torchrelay.scheduler.policy.handlers import relay_plans
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.replication.pack_worth import PackWorth, pack_worth
from torchrelay.scheduler.policy.replication.repair import CopyOrder, PackDemand, ReplicationInput, Steps
from torchrelay.scheduler.policy.replication.replication_state import PackUse
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.types import Instance, Model, StoreStatus

_WORK_PER_TICK: Final = 1200  # looks at a copy, a pack or a store, a few microseconds each
_ORDERS_PER_TICK: Final = 4


def replicate(state: State, now: float) -> None:
    """Decides on all copies, a few times a second, or less often in a large cluster, of which each tick looks at a
    part; not before all stores had time to report after a start.
    """
    config, replication_state = state.config, state.replication_state
    if not config.replicate:
        return
    if not replication_state.orders and replication_state.decision is None:
        if now < max(replication_state.due_at, state.started_at + config.refusal_settle_s):
            return
        replication_state.due_at = now + config.replicate_every_s
        replication_state.decision = _decide(state, now)
    if replication_state.decision is not None:
        left = _WORK_PER_TICK
        for work in replication_state.decision:
            left -= work
            if left <= 0:
                return
        replication_state.decision = None
    for _ in range(min(len(replication_state.orders), _ORDERS_PER_TICK)):
        _order_copy(state, replication_state.orders.popleft(), now)


def _decide(state: State, now: float) -> Steps[None]:
    """Decides on the copies as the stores report them now."""
    config, replication_state, stores = state.config, state.replication_state, dict(state.membership.stores)
    for instance in tuple(state.instances):
        if instance.staying and (model := _model_of(state, instance)):
            replication_state.recent_packs.note(model, now)
        yield 1
    replication_input = yield from _replication_input(state, stores, now)
    plan = yield from state.strategies.repair(replication_input, config)
    replication_state.settled = (replication_state.settled & plan.in_demand) | plan.settled
    replication_state.num_short = plan.num_short
    replication_state.orders.extend(plan.orders)

    def command(retain: RetainCommand) -> None:
        state.effects.commands.append(retain)  # of the tick that continues the decision

    yield from replication_state.retain(plan.retained_packs, plan.disk_order, stores, now, config, command)


def _model_of(state: State, instance: Instance) -> Model | None:
    """The model of an instance. If an earlier scheduler loaded it, only what the host's copy shows of it is known."""
    if model := state.models.get(instance.version_id):
        return model
    store = state.membership.store_of(instance.host_id)
    copy = store.copies.get(instance.pack_id) if store else None
    return Model(instance.model, instance.version_id, copy.pack_id, copy.pack_bytes, 0) if copy else None


def _replication_input(state: State, present: Mapping[str, StoreStatus], now: float) -> Steps[ReplicationInput]:
    replication_state = state.replication_state
    away = replication_state.away(now)
    replication_state.keep_lost(
        lambda pack_id: (
            bool(state.membership.whole_holders(pack_id))
            or any(pack_id in store.copies and store.copies[pack_id].complete for store in away.values())
        )
    )
    packs = []
    for use in list(replication_state.recent_packs):
        pack_id = use.model.pack_id
        settled, lost = pack_id in replication_state.settled, pack_id in replication_state.lost
        worth = replication_state.worths.of(pack_id, now, partial(_worth, state, use, now))
        packs.append(PackDemand(pack_id, use.model.pack_bytes, use.last_used, settled, lost, worth))
        yield 5
    avoid, under_way = replication_state.avoid(now, state.config), state.transfers.ordered
    return ReplicationInput(now, {**away, **present}, packs, frozenset(away), under_way, avoid)


def _worth(state: State, use: PackUse, now: float) -> PackWorth:
    """Worth of a copy of the pack."""
    model = use.model
    usage = state.usages.known(model.version_id) or Usage(last_used=use.last_used)
    rate_per_s, target_s = usage.expected_per_s(now), state.ttft_target_s(usage)
    load_costs = {
        tier: load_cost(load_s, rate_per_s, target_s, state.late_s(model))
        for tier, load_s in state.load_times.by_tier(model, state.config).items()
    }
    return pack_worth(model, load_costs, usage.next_use_s(now), state.membership.is_on_disk(model.pack_id))


def _order_copy(state: State, order: CopyOrder, now: float) -> None:
    """Orders the copy, unless its store or pack is gone since the decision, or the store has the pack."""
    store = state.membership.stores.get(order.store_id)
    if store is None or order.pack_id not in state.replication_state.recent_packs:
        return
    if (copy := store.copies.get(order.pack_id)) is not None and not copy.error:
        return
    use = state.replication_state.recent_packs.use(order.pack_id)
    model, cause, urgent = use.model, order.cause.value, order.urgent
    store_ids, reason = [order.store_id], Reason(cause, order.reason)
    (edge,) = relay_plans.plan_relay(
        state, model.pack_id, model.pack_bytes, store_ids, now, urgent=urgent, reason=reason, cause=order.cause
    )
    hop = Hop(edge.target, edge.sources, (), edge.num_striped)
    first = relay_plans.goes_first(state, model.pack_id, order.store_id)
    state.effects.commands.append(CopyCommand(model, hop, first, not order.may_evict_retained))
    fields = {"cause": cause, "pack_id": order.pack_id, "store_id": order.store_id, "source": edge.upstream}
    relay_plans.record_copy_event(
        state, now, cause, model, f"{order.reason}: {edge}; {_worth(state, use, now)}", fields
    )


def record_evictions(state: State, store: StoreStatus, now: float) -> None:
    """Records copies that the store no longer reports: it evicted them to free space, or they were dropped."""
    replication_state = state.replication_state
    for pack_id in replication_state.evicted(store):
        if pack_id in replication_state.recent_packs:
            use = replication_state.recent_packs.use(pack_id)
            reason = f"no longer in the RAM of {store.store_id}; {_worth(state, use, now)}"
            fields = {"pack_id": pack_id, "store_id": store.store_id}
            relay_plans.record_copy_event(state, now, "evicted", use.model, reason, fields)


def store_seen(state: State, store: StoreStatus, before: StoreStatus | None, now: float) -> None:
    """Records a store's report; ``before``: its previous report. Packs that an earlier scheduler made it retain count
    as recently used.
    """
    replication_state = state.replication_state
    replication_state.returned(store, before)
    for copy in store.copies.values():
        if copy.retained and copy.pack_id not in replication_state.recent_packs:
            replication_state.recent_packs.note(Model(copy.pack_id[:12], "", copy.pack_id, copy.pack_bytes, 0), now)
