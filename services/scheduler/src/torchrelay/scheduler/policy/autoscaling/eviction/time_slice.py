"""Time slices: more models are busy than there are slots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torchrelay.common.quantities import format_duration
from torchrelay.scheduler.policy.autoscaling.autoscaler_input import (
    AutoscalerInput,
    Demand,
    Drain,
    InstanceLoad,
    SetRoles,
)
from torchrelay.scheduler.policy.autoscaling.eviction.drains import cost_text, drain_of
from torchrelay.scheduler.policy.autoscaling.eviction.exchange import Exchange, exchange_of
from torchrelay.scheduler.policy.autoscaling.eviction.overdue import overdue_s
from torchrelay.scheduler.policy.autoscaling.eviction.slot_choice import enough
from torchrelay.scheduler.policy.autoscaling.eviction.slot_claims import SlotClaims
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.types import InstancePhase, Roles


def any_slice_pays(demand: Demand, autoscaler_input: AutoscalerInput, claims: SlotClaims, config: PolicyConfig) -> bool:
    """Whether any slot that was held for a time slice is worth more to the waiting model than to its own."""
    held_since, spared = autoscaler_input.now - config.time_slice_s, {demand.model.version_id, *claims.versions}
    least_losses = autoscaler_input.cluster_load.least_losses
    return any(
        load.instance.phase is InstancePhase.READY
        and load.instance.since <= held_since
        and exchange_of(load, demand, claims, config.time_slice_s).pays
        for version_id in least_losses.up_to(demand.num_gained(config.time_slice_s), autoscaler_input.now)
        if version_id not in spared
        for load in autoscaler_input.cluster_load.of_version(version_id)
    )


def slice_exchanges(
    demand: Demand, autoscaler_input: AutoscalerInput, claims: SlotClaims, config: PolicyConfig
) -> dict[str, Exchange]:
    """The exchange of each slot that the model could take from another for a time slice, by instance."""
    return {
        load.instance.instance_id: exchange_of(load, demand, claims, config.time_slice_s)
        for load in autoscaler_input.loads
        if load.instance.version_id not in {demand.model.version_id, *claims.versions}
        and load.instance.instance_id not in autoscaler_input.reserved
    }


def end_time_slice(
    demand: Demand,
    missing: Roles,
    autoscaler_input: AutoscalerInput,
    claims: SlotClaims,
    config: PolicyConfig,
    overdue_tenant: str,
) -> list[SetRoles | Drain]:
    """Ends a time slice when more models are busy than there are slots: drains the slot whose model loses least among
    those that were held for a time slice, if the waiting model gains as much. A model that is overdue takes the slot
    that loses least, whatever that is, and waits for at most a time slice until that slot was held for a time slice. If
    the weights of a pack are in the way, all its slots on one host are drained. Requests of the drained model wait for
    its next time slice.
    """
    model, held_since = demand.model, autoscaler_input.now - config.time_slice_s
    exchanges = slice_exchanges(demand, autoscaler_input, claims, config)

    def is_over(load: InstanceLoad) -> bool:
        return load.instance.phase is InstancePhase.READY and load.instance.since <= held_since

    loads = [load for load in autoscaler_input.loads if load.instance.instance_id in exchanges]
    able = [load for load in loads if is_over(load) and exchanges[load.instance.instance_id].pays]
    victims = _cheapest(able, exchanges, demand, missing, claims)
    if not victims and overdue_tenant:
        may_wait = demand.slot_wait_s < overdue_s(demand, config) + config.time_slice_s
        able = [load for load in loads if is_over(load) or (may_wait and load.instance.staying)]
        victims = _cheapest(able, exchanges, demand, missing, claims)
    if not all(map(is_over, victims)):
        return []  # waits for this slot's time slice to end rather than take a more valuable slot
    waited = (
        f"{{}} has waited {format_duration(demand.oldest_wait_s)}, and no slot can be spared; this one was held for"
    )
    drains: list[SetRoles | Drain] = []
    for load in victims:
        exchange = exchanges[load.instance.instance_id]
        held = format_duration(autoscaler_input.now - load.instance.since)
        taker = "" if exchange.pays else overdue_tenant
        drains.append(
            drain_of(load, "time_slice", f"{waited} {held}{cost_text(load, exchange)}", model, exchange.figures, taker)
        )
    return drains


def _cheapest(
    able: Sequence[InstanceLoad],
    exchanges: Mapping[str, Exchange],
    demand: Demand,
    missing: Roles,
    claims: SlotClaims,
) -> list[InstanceLoad]:
    """The slots that lose least and suffice for the missing roles; else all slots of a pack on a host, if only together
    they make space for the weights; else none.
    """
    candidates = sorted(
        able,
        key=lambda load: (
            exchanges[load.instance.instance_id].num_lost,
            load.instance.since,
            load.instance.instance_id,
        ),
    )
    alone = {
        load.instance.instance_id: claims.roles(demand, load.instance.worker_id, without=[load]) for load in candidates
    }
    if chosen := enough(alone, missing):
        return [load for load in candidates if load.instance.instance_id in chosen]
    together = defaultdict[tuple[str, str], list[InstanceLoad]](list)
    for load in candidates:
        together[load.instance.host_id, load.instance.pack_id].append(load)
    for group in together.values():
        slots = {load.instance.instance_id: claims.roles(demand, load.instance.worker_id, group) for load in group}
        if enough(slots, missing):
            return group
    return []
