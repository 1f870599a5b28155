"""Gives a role that is short to an instance of the model's other role, which has the weights already."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchrelay.scheduler.policy.autoscaling.actions import Action, Load, SetRoles
from torchrelay.scheduler.policy.autoscaling.demand import Demand
from torchrelay.scheduler.policy.autoscaling.sizing import Growth, Sizing, sizings_of
from torchrelay.scheduler.policy.autoscaling.view import View
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.types import InstancePhase


def change_role(
    demand: Demand,
    growth: Growth,
    view: View,
    decided: Sequence[Action],
    *,
    most_lost: float,
) -> list[SetRoles]:
    """The role change of an instance, if roles are sized apart, only one is short, and the other role loses less than
    half of what the short role gains, so that the same demand never reverses the change, and less than ``most_lost``
    late requests. At most one instance of a model changes its role per time slice, and none that was ``decided`` on.
    """
    if demand.decode is None or len(growth.missing) > 1:
        return []
    own = view.instances.of_version(demand.model.version_id)
    held_since = view.now - view.config.time_slice_s
    acted_on = {action.instance_id for action in decided if not isinstance(action, Load)}
    if not all(_is_kept(instance, held_since) and instance.instance_id not in acted_on for instance in own):
        return []
    gaining, losing = sorted(
        sizings_of(demand, growth.playing), key=lambda sizing: sizing.roles.isdisjoint(growth.missing)
    )
    gained = max(gaining.work.fluid.num_saved(gaining.number, 0.0), growth.num_saved)
    lost = losing.num_lost if losing.number > 1 else math.inf
    if lost >= most_lost or gained < 2 * lost + gaining.work.fluid.least_saved(gaining.number, growth.load_s):
        return []
    if lost < 1 and losing.work.last_full_at > held_since:
        return []  # the other role needed all its instances less than a time slice ago
    able = _able(own, gaining, losing, held_since, demand, view)
    if not able:
        return []
    chosen = min(able, key=lambda instance: (instance.work.num_open, instance.instance_id))
    (role,), (other,) = gaining.roles, losing.roles
    plain = f"{role.name.lower()} needs this instance more than {other.name.lower()}"
    text = f"{plain}: {gained:.1f} late requests saved, {lost:.1f} lost"
    by_tenant = dict.fromkeys(demand.by_tenant, plain)
    reason = Reason("role_short", text, {"num_saved": gained, "num_lost": lost}, by_tenant)
    return [SetRoles(chosen.instance_id, gaining.roles, reason)]


def _is_kept(instance: Instance, held_since: float) -> bool:
    """Whether the instance stays, with roles that it has had for a time slice."""
    return instance.staying and instance.roles_since <= held_since


def _able(
    instances: Sequence[Instance],
    gaining: Sizing,
    losing: Sizing,
    held_since: float,
    demand: Demand,
    view: View,
) -> list[Instance]:
    """Instances that can change from one role to the other. Another one that is loaded and has at least their KV pool
    stays, so that the model serves the same requests as before.
    """
    ready = [
        (instance, worker)
        for instance in instances
        if instance.target_roles == losing.roles
        and instance.phase is InstancePhase.READY
        and instance.worker_id not in view.membership.suspects
        and (worker := view.membership.workers.get(instance.worker_id)) is not None
    ]
    return [
        instance
        for instance, worker in ready
        if worker.roles_for(demand.most_kv_bytes) >= gaining.roles
        and instance.since <= held_since
        and instance.takes_roles(view.now)
        and instance.instance_id not in view.reserved
        and any(other.kv_pool_bytes >= worker.kv_pool_bytes for each, other in ready if each is not instance)
    ]
