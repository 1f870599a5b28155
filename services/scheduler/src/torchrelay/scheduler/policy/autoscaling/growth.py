"""Growth of a model that serves: the instances that are worth their slots, and the changes of its own instances' roles
that may take the place of loads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from torchrelay.common.quantities import format_duration
from torchrelay.scheduler.policy.autoscaling.actions import Action, Load, SetRoles
from torchrelay.scheduler.policy.autoscaling.bids import Gain
from torchrelay.scheduler.policy.autoscaling.slots import FreeSlot, FreeSlots, SlotAssignment, assign
from torchrelay.scheduler.policy.autoscaling.view import View
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.demand.demand import Demand, Sizing, sizings_of
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.storage_tiers import Tier, tier_of
from torchrelay.scheduler.policy.types import ROLES, InstancePhase, Role


def wanted_instances(demand: Demand, playing: Counter[Role], load_s: float, config: PolicyConfig) -> Counter[Role]:
    """Wanted instances per role: those ``playing`` it, and more, up to the model's maximum, while each is predicted to
    save more late requests than it costs. One more also if enough requests were late recently; if roles are sized
    apart, these count for decode if it has more answers than its instances hold.
    """
    most = demand.model.max_instances or config.max_instances
    sizings = sizings_of(demand, playing)
    is_full = demand.decode is not None and demand.decode.backlog_s(playing[Role.DECODE]) > 0
    late_role = Role.DECODE if is_full else Role.PREFILL
    wanted: Counter[Role] = Counter()
    for sizing in sizings:
        work, number = sizing.work, sizing.number
        num_late = demand.num_late_before if late_role in sizing.roles and load_s < demand.late_s else 0
        is_short = number < most and num_late >= work.fluid.least_saved(number, load_s)
        number = max(number + is_short, work.fluid.wanted(number, load_s, most))
        wanted |= Counter(dict.fromkeys(sizing.roles, number))
    return wanted


@dataclass(frozen=True)
class Growth:
    """More instances for a model that serves. ``missing``: the part of ``wanted`` that it does not have."""

    wanted: Counter[Role]
    missing: Counter[Role]
    load_s: float
    num_saved: float  # late requests that the first further instance saves
    held_s: float  # how long that is expected to be held

    @property
    def playing(self) -> Counter[Role]:
        """Instances per role that the model has."""
        return self.wanted - self.missing


def growth_of(demand: Demand, view: View, playing: Counter[Role], free: FreeSlots) -> Growth | None:
    """Growth of a model that can serve already; None if more instances are not worth their slots. ``playing``:
    instances per role that the model has, with those that were decided on.
    """
    sizings = sizings_of(demand, playing)
    if (
        not all(playing[role] for role in ROLES)
        or view.now < demand.not_before
        or not (demand.num_late_before or any(sizing.work.fluid.num_saved(sizing.number, 0.0) for sizing in sizings))
    ):
        return None
    load_s = next_load_s(demand, view, free)
    wanted = wanted_instances(demand, playing, load_s, view.config)
    if not (missing := wanted - playing):
        return None
    num_saved, held_s = max(
        (sizing.work.fluid.num_saved(sizing.number, load_s), sizing.work.fluid.held_s(sizing.number, load_s))
        for sizing in sizings
        if not sizing.roles.isdisjoint(missing)
    )
    return Growth(wanted, missing, load_s, max(num_saved, demand.num_late_before), held_s)


def gains_of(demand: Demand, growth: Growth, missing: Counter[Role]) -> Iterator[Gain]:
    """Yields the gain of each instance that is still ``missing``."""
    sizings = [sizing for sizing in sizings_of(demand, growth.playing) if not sizing.roles.isdisjoint(growth.missing)]
    for more in count(max((growth.missing - missing).values(), default=0)):
        saved = growth.num_saved
        if more:
            saved = max(sizing.work.fluid.num_saved(sizing.number + more, growth.load_s) for sizing in sizings)
        yield Gain(saved, growth.held_s, f"saves {saved:.1f} late requests")


def growth_slots(
    demand: Demand, growth: Growth, missing: Counter[Role], slots: Sequence[FreeSlot]
) -> tuple[SlotAssignment, ...]:
    """Slots for the instances that are still ``missing``. If roles are sized apart, each slot gets one role, and the
    role that saves most comes first.
    """
    if demand.decode is None:
        return assign(missing, slots)
    savings = [
        (-sizing.work.fluid.num_saved(sizing.number + more, growth.load_s), role)
        for sizing in sizings_of(demand, growth.wanted - missing)
        for role in sizing.roles
        for more in range(missing[role])
    ]
    chosen: dict[str, SlotAssignment] = {}
    for _, role in sorted(savings):
        left = [slot for slot in slots if slot.worker_id not in chosen]
        chosen |= {assignment.worker_id: assignment for assignment in assign(Counter((role,)), left)}
    return tuple(chosen.values())


def next_load_s(demand: Demand, view: View, free: FreeSlots) -> float:
    """Predicted load time of one more instance, in a free slot or else in that of an idle instance."""
    nearest = free.of(demand.model, demand.avoid, demand.least_kv_bytes, most=1)
    tier = min(slot.tier for slot in nearest) if nearest else _nearest(demand, view)
    return demand.load_s.get(tier, 0.0)


def _nearest(demand: Demand, view: View) -> Tier:
    """The nearest tier from which the best slot of an idle instance would load the model."""
    pack_id, workers = demand.model.pack_id, view.membership.workers
    is_held = any(True for _ in view.membership.holders(pack_id))
    tiers = []
    for instance in view.idle:
        worker, store = workers.get(instance.worker_id), view.membership.stores_by_host.get(instance.host_id)
        if worker is not None and store is not None and demand.model.fits(worker):
            tiers.append(tier_of(pack_id, store, is_held))
    return min(tiers, default=Tier.PEER)


def growth_reason(demand: Demand, growth: Growth) -> Reason:
    """Reason of a growth: the late requests that it saves and its load time."""
    numbers = [growth.wanted[role] for role in ROLES]
    num_paid = (growth.load_s + growth.held_s) / demand.late_s
    wanted = f"{numbers[0]} per role wanted"
    if (decode := demand.decode) is not None:
        answers = f"{decode.num_answers} answers, {decode.num_held} on each"
        wanted = f"{numbers[0]} prefill and {numbers[1]} decode wanted ({answers})"
    text = (
        f"{wanted}: the next saves {growth.num_saved:.1f} late requests, costs {num_paid:.1f}, and loads in "
        f"{format_duration(growth.load_s)}; a queue of {format_duration(demand.backlog_s)}, "
        f"a wait of {format_duration(demand.oldest_wait_s)} (target {format_duration(demand.target_s)})"
    )
    figures = {
        "num_wanted": max(growth.wanted[role] for role in growth.missing),
        "num_saved": growth.num_saved,
        "num_paid": num_paid,
        "load_s": growth.load_s,
        "held_s": growth.held_s,
        "backlog_s": demand.backlog_s,
        "oldest_wait_s": demand.oldest_wait_s,
    }
    return demand.load_reason("growth", text, figures)


def role_change(
    demand: Demand, growth: Growth, view: View, decided: Sequence[Action], *, most_lost: float
) -> list[SetRoles]:
    """The role change of an instance, which has the weights already, if roles are sized apart, only one is short, and
    the other role loses less than half of what the short role gains, so that the same demand never reverses the change,
    and less than ``most_lost`` late requests. At most one instance of a model changes its role per time slice, and none
    that was ``decided`` on.
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
