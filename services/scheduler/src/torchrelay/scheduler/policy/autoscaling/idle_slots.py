"""Slots that their models give up: unused for the keep time, not needed for as long, or loaded for no request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torchrelay.common.quantities import format_duration
from torchrelay.scheduler.policy.autoscaling.actions import Action, Drain, SetRoles
from torchrelay.scheduler.policy.autoscaling.view import View, cover_both_roles
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.demand.demand import Demand, Sizing, sizings_of
from torchrelay.scheduler.policy.reasons import Reason

_CANCELLED = Reason("cancel", "no request waits for it any more")


def idle_slots(view: View, decided: Sequence[Action]) -> Iterator[Drain]:
    """Yields the drains of instances that were unused for the keep time: all of a model, or those that the others can
    replace.
    """
    demands = {demand.model.version_id: demand for demand in view.demands}
    drained = {action.instance_id for action in decided if isinstance(action, Drain)}
    changed = {action.instance_id for action in decided if isinstance(action, SetRoles)}
    for version_id, staying in view.evaluated.items():
        demand = demands.get(version_id)
        if version_id in view.waited_for or (demand is not None and demand.is_expected(view.now)):
            continue
        if any(instance.instance_id in changed for instance in staying):
            continue  # each of the others may be the last that plays a role
        instances = [instance for instance in staying if instance.instance_id not in drained]
        spare = [instance for instance in instances if instance.instance_id not in view.reserved]
        abandoned_since = view.now - view.config.cancel_after_s
        if all(each.is_loading and view.is_idle_since(each, abandoned_since) for each in instances):
            yield from (Drain(each.instance_id, _CANCELLED) for each in spare)
            continue
        keep_s = view.keep_s(version_id)
        idle = [instance for instance in spare if view.is_idle_since(instance, view.now - keep_s)]
        is_whole, is_deleted = len(idle) == len(instances), demand is not None and demand.is_deleted
        for instance in idle:
            if not is_whole and not _can_do_without(instance, instances, demand):
                continue
            instances = [other for other in instances if other is not instance]
            reason = _idle_reason(view.now - instance.unused_since, keep_s, is_deleted=is_deleted)
            if not is_whole:
                reason = replace(reason, text=f"{reason.text}; others of the model remain")
            yield Drain(instance.instance_id, reason)
        if demand is not None and len(instances) == len(staying):
            yield from _uncrowded(demand, instances, spare, view.now)


def _can_do_without(instance: Instance, instances: Sequence[Instance], demand: Demand | None) -> bool:
    """Whether the model's other ``instances`` serve without an unused one. If requests may be placed on a loading
    instance, it would be loaded again at once.
    """
    is_awaited = instance.is_loading and demand is not None and demand.num_cold > 0
    return not is_awaited and can_spare(instance, instances)


def can_spare(instance: Instance, instances: Sequence[Instance]) -> bool:
    """Whether the other instances play both roles."""
    return cover_both_roles(other for other in instances if other is not instance)


def _uncrowded(demand: Demand, instances: Sequence[Instance], spare: Sequence[Instance], now: float) -> list[Drain]:
    """Drains the least busy instance if one fewer was enough for as long as a late request is worth. Needed because
    dispatch spreads requests over all instances, so that none is ever idle. If roles are sized apart, one per role.
    """
    if demand.num_cold:
        return []  # the loads may be for these requests
    playing = Counter(role for instance in instances for role in instance.target_roles)
    drains = []
    for sizing in sizings_of(demand, playing):
        # Of instances that play both roles, the demand knows when answers needed all of them.
        if sizing.number > 1 and sizing.work is not demand.answers:
            drains += _spare(demand, instances, sizing, spare, now)
    return drains


def _spare(
    demand: Demand, instances: Sequence[Instance], sizing: Sizing, spare: Sequence[Instance], now: float
) -> list[Drain]:
    """Drains an instance that plays only the sizing's roles, unless all that play them were needed recently."""
    playing = [instance for instance in instances if instance.target_roles & sizing.roles]
    spare_s = now - max(sizing.work.last_full_at, *(instance.changed_at for instance in playing))
    if spare_s < demand.spare_s:
        return []
    for instance in sorted(playing, key=lambda instance: (instance.work.num_open, instance.instance_id)):
        if instance in spare and instance.target_roles <= sizing.roles and can_spare(instance, instances):
            text = f"the others were enough for {format_duration(spare_s)} (limit {format_duration(demand.spare_s)})"
            figures = {"idle_s": spare_s, "idle_timeout_s": demand.spare_s}
            return [Drain(instance.instance_id, Reason("idle", text, figures))]
    return []


def _idle_reason(idle_s: float, keep_s: float, *, is_deleted: bool) -> Reason:
    limit = "its model is deleted" if is_deleted else f"limit {format_duration(keep_s)}"
    return Reason("idle", f"idle for {format_duration(idle_s)} ({limit})", {"idle_s": idle_s, "idle_timeout_s": keep_s})
