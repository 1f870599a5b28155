"""Autoscaling by an auction of slots: decides which instances to load, drain or give other roles.

for each model that cannot serve its requests, those of tenants without a slot first, then the longest wait first:
    load it into free slots, or give the missing role to an instance of its own
    else take the cheapest slot of another model, by the table of ``asks.py``
for each model that can serve:
    grow to the number of instances that save most beyond their cost, but not into slots for which others wait
for each minimum, load what is missing; for each expected request, load its model into a free slot
drain what was unused for its keep time, or not needed for as long; cancel loads that no request waits for
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from itertools import repeat
from typing import TypeAlias

from torchrelay.common.quantities import format_duration
from torchrelay.scheduler.policy.autoscaling.actions import Action, Load, SetRoles
from torchrelay.scheduler.policy.autoscaling.asks import take_idle_slots, take_slots
from torchrelay.scheduler.policy.autoscaling.bids import Gain
from torchrelay.scheduler.policy.autoscaling.growth import gains_of, growth_of, growth_reason, growth_slots, role_change
from torchrelay.scheduler.policy.autoscaling.idle_slots import idle_slots
from torchrelay.scheduler.policy.autoscaling.ledger import Ledger
from torchrelay.scheduler.policy.autoscaling.slots import FreeSlot, FreeSlots, SlotAssignment, assign
from torchrelay.scheduler.policy.autoscaling.view import View
from torchrelay.scheduler.policy.demand.demand import Demand
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.types import BOTH, ROLES, InstancePhase, Role, Roles

ChooseSlots: TypeAlias = Callable[[Counter[Role], Sequence[FreeSlot]], tuple[SlotAssignment, ...]]


def auction(view: View) -> tuple[Action, ...]:
    """All actions that are due; an auction after applying them yields none."""
    decision = _Auction(view)
    starving = [demand for demand in decision.lacking() if not decision.load_first(demand)]
    for demand in starving:
        decision.take_slot(demand)
    decision.keep_free_for(starving)
    if view.has_all_waiting:
        for demand in decision.demands:
            decision.grow(demand)
        for demand in decision.demands:
            decision.fill_minimum(demand)
            decision.load_expected(demand)
    return (*decision.actions, *idle_slots(view, decision.actions))


class _Auction:
    """The actions so far, with the free slots that they leave and the roles that they grant."""

    def __init__(self, view: View) -> None:
        self.actions: list[Action] = []
        # The longest wait for a slot comes first.
        self.demands = sorted(view.demands, key=lambda demand: -demand.slot_wait_s)
        self._view = view
        self._granted = defaultdict[str, Counter[Role]](Counter)  # instances per role, by version
        self._free = FreeSlots(view.instances, view.membership)

    @cached_property
    def _ledger(self) -> Ledger:
        return Ledger(self._view, decided=self.actions)

    def lacking(self) -> list[Demand]:
        """Models that lack a role for a waiting request: those of tenants without any slot first."""
        lacking = [
            demand
            for demand in self.demands
            if demand.num_waiting
            and self._view.now >= demand.not_before
            and self._view.missing(demand, demand.most_kv_bytes)
        ]
        if len(lacking) > 1:
            lacking.sort(key=lambda demand: not demand.slotless_tenant(self._view.num_slots_of))
        return lacking

    def load_first(self, demand: Demand) -> bool:
        """Gives the model the roles that it lacks for its largest request, else for its smallest, without taking a slot
        from another; whether it could.
        """
        for kv_bytes in sorted({demand.most_kv_bytes, demand.least_kv_bytes}, reverse=True):
            if not (missing := self._view.missing(demand, kv_bytes)):
                continue
            reason = demand.load_reason("at_zero" if missing >= BOTH else "role_missing")
            rest = self._load(demand, Counter(missing), kv_bytes, reason)
            if rest.total() < len(missing) or self._assign_both_roles(demand, missing, kv_bytes):
                return True
        return False

    def _assign_both_roles(self, demand: Demand, missing: Roles, kv_bytes: int) -> bool:
        """Gives the missing role to an instance of the other role, which moves no weights, so that it serves at
        once.
        """
        own = self._view.of(demand.model)
        for instance in sorted(own, key=lambda each: (each.phase is not InstancePhase.READY, each.work.num_open)):
            worker = self._view.membership.workers.get(instance.worker_id)
            if worker and worker.roles_for(kv_bytes) >= BOTH and instance.takes_roles(self._view.now):
                names = " and ".join(role.name.lower() for role in sorted(missing))
                reason = Reason("role_missing", f"no instance plays {names}, and no slot is free")
                self.actions.append(SetRoles(instance.instance_id, BOTH, reason))
                return True
        return False

    def take_slot(self, demand: Demand) -> None:
        """Takes the cheapest slot of another model, if that costs less than it saves."""
        self.actions += take_slots(demand, self._view, self._ledger)

    def keep_free_for(self, demands: Iterable[Demand]) -> None:
        """Leaves the slots that suit these models in part to them: no model grows into these."""
        for demand in demands:
            self._free.take(self._free.of(demand.model, kv_bytes=demand.most_kv_bytes))

    def grow(self, demand: Demand) -> None:
        """Adds instances of a model that serves: by an instance that its other role can spare, which serves at once,
        then in free slots and slots of idle models, and last by an instance that is worth less to its other role.
        """
        growth = growth_of(demand, self._view, self._playing(demand), self._free)
        if growth is None:
            return
        change = partial(role_change, demand, growth, self._view, self.actions)
        changed = change(most_lost=1.0)
        missing = growth.missing - Counter(role for action in changed for role in action.roles)
        reason, choose = growth_reason(demand, growth), partial(growth_slots, demand, growth)
        if rest := self._load(demand, missing, demand.least_kv_bytes, reason, choose):
            evicted = take_idle_slots(demand, rest, gains_of(demand, growth, rest), self._view, self._ledger)
            self.actions += evicted
            if not (changed or evicted) and rest == missing:
                changed = change(most_lost=math.inf)
        if changed:
            self.actions += changed
            self._ledger.add(changed)

    def fill_minimum(self, demand: Demand) -> None:
        """Loads the instances that a model lacks of its minimum, into free slots and those of idle models."""
        minimum = self._view.minimums.get(demand.model.version_id)
        if minimum is None or self._view.now < demand.not_before:
            return
        playing = self._playing(demand)
        if not (missing := +Counter({role: minimum.number - playing[role] for role in ROLES})):
            return
        plain = dict.fromkeys(demand.by_tenant, minimum.plain_text)
        reason = Reason("minimum", minimum.text(self._view.now), {"num_wanted": minimum.number}, plain)
        if missing := self._load(demand, missing, 0, reason):
            gain = Gain(math.inf, 0.0, f"lacks instances of its minimum, {minimum.number} per role")
            self.actions += take_idle_slots(demand, missing, repeat(gain), self._view, self._ledger)

    def load_expected(self, demand: Demand) -> None:
        """Loads a model whose next request is expected, if a slot is free for it."""
        now = self._view.now
        if demand.is_expected(now) and now >= demand.not_before and not self._playing(demand):
            left_s = demand.forecast[1] - now
            text = f"its next request is expected within {format_duration(left_s)}, by when it came of late"
            self._load(demand, Counter(ROLES), 0, Reason("forecast", text, {"left_s": left_s}))

    def _playing(self, demand: Demand) -> Counter[Role]:
        """Instances of the model per role, with those that were decided on."""
        playing = Counter(role for instance in self._view.of(demand.model) for role in instance.target_roles)
        playing.update(self._granted.get(demand.model.version_id, {}))
        return playing

    def _load(
        self, demand: Demand, missing: Counter[Role], kv_bytes: int, reason: Reason, choose: ChooseSlots = assign
    ) -> Counter[Role]:
        """Loads as many of the ``missing`` instances per role as there are free slots; returns the rest."""
        slots = self._free.for_roles(demand.model, demand.avoid, kv_bytes, missing)
        if not (assignments := choose(missing, slots)):
            return missing
        self.actions.append(Load(demand.model, assignments, reason))
        self._free.take(assignments)
        loaded = Counter(role for assignment in assignments for role in assignment.roles)
        self._granted[demand.model.version_id] += loaded
        return missing - loaded
