"""The slot that a model with several slots can do without."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torchrelay.common.quantities import format_duration
from torchrelay.scheduler.policy.autoscaling.autoscaler_input import (
    AutoscalerInput,
    Demand,
    Drain,
    InstanceLoad,
    SetRoles,
    cover_both_roles,
)
from torchrelay.scheduler.policy.autoscaling.eviction.drains import cost_text, drain_of
from torchrelay.scheduler.policy.autoscaling.eviction.exchange import exchange_of
from torchrelay.scheduler.policy.autoscaling.eviction.slot_claims import SlotClaims
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.types import BOTH, InstancePhase, Role, Roles


def preempt_spare(
    demand: Demand,
    missing: Roles,
    autoscaler_input: AutoscalerInput,
    claims: SlotClaims,
    config: PolicyConfig,
) -> list[SetRoles | Drain]:
    """Drains one of the slots of a model with several, if the others cover its roles or one of them can take both, or
    if the model cannot serve with them anyway. A slot that is worth more to its model stays for a time slice, and until
    the other model has waited for a time slice.

    A prefill instance goes first: its work ends soon, and decoding is not disturbed.
    """
    most_lost = math.inf if demand.slot_wait_s >= config.time_slice_s else demand.num_gained(config.time_slice_s)
    best: _SharedSlot | None = None
    losses, now = autoscaler_input.cluster_load.least_losses, autoscaler_input.now
    for version_id in losses.others(now):
        shared = _shared_slot(version_id, demand, missing, autoscaler_input, claims, config)
        best = min(filter(None, (best, shared)), default=None)
    if best is not None and best.cost[:2] < _WHOLE:
        return best.actions
    for least_lost, version_id in losses.whole_up_to(most_lost, now):
        if best is not None and best.cost[:2] == _WHOLE and least_lost > best.cost[2]:
            break
        shared = _shared_slot(version_id, demand, missing, autoscaler_input, claims, config)
        best = min(filter(None, (best, shared)), default=None)
    return best.actions if best is not None else []


_WHOLE = (False, True)  # of an instance that plays both roles, as the others of its model do


class _SharedSlot(NamedTuple):
    """A slot that a model can do without. ``cost``: whether roles change, whether it decodes, its lost requests, its
    open requests; and its id.
    """

    cost: tuple[bool, bool, float, int, str]
    actions: list[SetRoles | Drain]


def _shared_slot(
    version_id: str,
    demand: Demand,
    missing: Roles,
    autoscaler_input: AutoscalerInput,
    claims: SlotClaims,
    config: PolicyConfig,
) -> _SharedSlot | None:
    """The version's slot that costs it least."""
    model, held_since = demand.model, autoscaler_input.now - config.time_slice_s
    if version_id == model.version_id or version_id in claims.versions:
        return None
    waited = f"{{}} has waited {format_duration(demand.oldest_wait_s)} for a slot, and this model can do without one"
    loads = autoscaler_input.staying_of(version_id)
    is_served = cover_both_roles(load.instance for load in loads)
    candidates: list[_SharedSlot] = []
    for victim in loads:
        instance = victim.instance
        if instance.phase is not InstancePhase.READY or instance.instance_id in autoscaler_input.reserved:
            continue
        exchange = exchange_of(victim, demand, claims, config.time_slice_s, is_spared=True)
        is_over = instance.since <= held_since and demand.slot_wait_s >= config.time_slice_s
        if is_served and not is_over and not exchange.pays:
            continue
        if not claims.roles(demand, instance.worker_id, without=[victim]) >= missing:
            continue
        drain = drain_of(victim, "preempt_spare", waited + cost_text(victim, exchange), model, exchange.figures)
        changes = _role_takeover(loads, victim, autoscaler_input, drain.reason)
        if changes is not None:
            is_decode = instance.plays(Role.DECODE)
            cost = (bool(changes), is_decode, exchange.num_lost, victim.num_open, instance.instance_id)
            candidates.append(_SharedSlot(cost, [*changes, drain]))
    return min(candidates, default=None)


def _role_takeover(
    loads: Sequence[InstanceLoad], victim: InstanceLoad, autoscaler_input: AutoscalerInput, reason: Reason
) -> list[SetRoles] | None:
    """Role changes with which a model serves without ``victim``; None if there are none."""
    rest = [load for load in loads if load is not victim]
    if cover_both_roles(load.instance for load in rest) or not cover_both_roles(load.instance for load in loads):
        return []
    for load in rest:
        worker = autoscaler_input.workers.get(load.instance.worker_id)
        ready = load.instance.phase is InstancePhase.READY and load.instance.takes_roles(autoscaler_input.now)
        if ready and worker is not None and worker.playable_roles >= BOTH:
            return [SetRoles(load.instance.instance_id, BOTH, reason)]
    return None
