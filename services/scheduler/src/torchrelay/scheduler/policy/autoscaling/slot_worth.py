"""The present worth of a slot to a model, in words: its bid for one more, the cost of its own, and why it waits.

The numbers come from the functions that decide. A tenant sees its own numbers and names: nothing is said of how much
another tenant's model loses or waits for, and models that share their files with other tenants show no count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from torchrelay.common.quantities import format_count, format_duration
from torchrelay.scheduler.policy.autoscaling.actions import Load
from torchrelay.scheduler.policy.autoscaling.asks import TIME_SLICE, Ask, ask_of, is_of_tenant
from torchrelay.scheduler.policy.autoscaling.auction import auction
from torchrelay.scheduler.policy.autoscaling.bids import Bid, longest_wait_s
from torchrelay.scheduler.policy.autoscaling.growth import next_load_s
from torchrelay.scheduler.policy.autoscaling.ledger import Ledger
from torchrelay.scheduler.policy.autoscaling.slots import FreeSlots
from torchrelay.scheduler.policy.autoscaling.view import View
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.config import ScalingMode
from torchrelay.scheduler.policy.demand.demand import Demand, sizings_of
from torchrelay.scheduler.policy.types import BOTH, InstancePhase, Roles


class WorthLine(NamedTuple):
    label: str
    text: str


def slot_worth(demand: Demand, view: View) -> list[WorthLine]:
    """Lines about the model of ``demand``, as its tenant may see them."""
    missing = view.missing(demand, demand.most_kv_bytes)
    waits = bool(demand.num_waiting and missing)
    lines = [_bid_for_first(demand, view) if missing else _bid_for_next(demand, view)]
    if view.of(demand.model):
        lines += _ask(demand, view)
    if waits:
        lines += _wait(demand, missing, view)
    return lines


def _device_seconds(num_late: float, demand: Demand) -> str:
    """The worth of late requests."""
    return f"{num_late * demand.late_s * demand.model.num_devices:,.0f} device seconds"


def _bid_for_first(demand: Demand, view: View) -> WorthLine:
    """The bid of a model that cannot serve: the late requests that a slot for a time slice would save."""
    if demand.by_tenant:
        return WorthLine("bid", "its files are shared with other tenants: no numbers of all together are shown")
    time_slice = format_duration(view.config.time_slice_s)
    if not demand.num_waiting:
        return WorthLine(
            "bid", f"none: no request waits, and the next one asks for a slot at once (a time slice of {time_slice})"
        )
    gained = Bid(demand, BOTH, "", "").num_gained(view.config.time_slice_s)
    waiting = f"{format_count(demand.num_waiting, 'request')} waiting, {demand.arrivals_per_s:.2g} more per second"
    return WorthLine(
        "bid",
        f"a slot for a time slice of {time_slice} saves {gained:.1f} late requests ({waiting}): "
        f"{_device_seconds(gained, demand)}",
    )


def _bid_for_next(demand: Demand, view: View) -> WorthLine:
    """The bid of a model that serves: the late requests that one more instance would save, against its cost."""
    if demand.by_tenant:
        return WorthLine("bid", "its files are shared with other tenants: no numbers of all together are shown")
    free = FreeSlots(view.instances, view.membership)
    load_s = next_load_s(demand, view, free)
    playing = Counter(role for instance in view.of(demand.model) for role in instance.target_roles)
    bids = []
    for sizing in sizings_of(demand, playing):
        saved, least = (
            sizing.work.fluid.num_saved(sizing.number, load_s),
            sizing.work.fluid.least_saved(sizing.number, load_s),
        )
        held = format_duration(sizing.work.fluid.held_s(sizing.number, load_s))
        roles = "" if demand.decode is None else f" {' and '.join(role.name.lower() for role in sorted(sizing.roles))}"
        if demand.answers is not None:
            roles = " (for its answers)" if sizing.work is demand.answers else " (for its prompts)"
        bids.append(
            f"one more{roles} instance beside {sizing.number} saves {saved:.1f} late requests "
            f"({_device_seconds(saved, demand)}) and costs {least:.1f} ({_device_seconds(least, demand)}): "
            f"{format_duration(load_s)} to load, held for {held}"
        )
    return WorthLine("bid", "; ".join(bids))


def _ask(demand: Demand, view: View) -> Iterator[WorthLine]:
    """The cost of the model's cheapest slot, if a model that loads as fast takes it for a time slice."""
    ledger = Ledger(view, decided=())
    own = [instance for instance in view.of(demand.model) if instance.instance_id not in view.reserved]
    if not own:
        yield WorthLine("ask", "none: its minimum keeps all its slots")
        return
    bid = Bid(demand, BOTH, "", "")
    asks = [ask_of(instance, bid, view, ledger, view.config.time_slice_s, TIME_SLICE) for instance in own]
    ask = min(asks, key=lambda ask: ask.rank)
    cheapest, lost = ask.instance, ask.num_lost
    where = f"{cheapest.instance_id} on {cheapest.worker_id}"
    worth = f"{lost:.1f} late requests ({_device_seconds(lost, demand)})"
    if demand.by_tenant:
        worth = "an undisclosed number of late requests, as its files are shared"
    text = f"to give up {where} for a time slice costs {worth}"
    if turn_left_s := _turn_left_s(cheapest, view):
        text += f"; its own time slice goes on for {format_duration(turn_left_s)}"
    yield WorthLine("ask", text)
    is_idle = not view.is_busy(cheapest) and cheapest.accepted and not demand.num_waiting
    if is_idle and not demand.by_tenant:  # it would tell when the other tenants used it
        idle_s = view.now - cheapest.unused_since
        keep_s = view.keep_s(demand.model.version_id)
        yield WorthLine("idle", f"for {format_duration(idle_s)}; kept for {format_duration(keep_s)}")


def _turn_left_s(instance: Instance, view: View) -> float:
    return max(instance.since + view.config.time_slice_s - view.now, 0.0)


def _wait(demand: Demand, missing: Roles, view: View) -> Iterator[WorthLine]:
    """The slot that a waiting model would get first, and why it has not got it."""
    ledger = Ledger(view, decided=())
    rest = ledger.claim(demand, missing)
    bid = Bid(demand, rest, "", "")
    asks = [
        ask_of(instance, bid, view, ledger, view.config.time_slice_s, TIME_SLICE)
        for instance in view.instances
        if instance.version_id != demand.model.version_id
        and instance.staying
        and instance.instance_id not in view.reserved
        and ledger.roles(demand, instance, [instance]) >= rest
    ]
    victim = min(asks, key=lambda ask: ask.rank, default=None)
    if rest and victim is not None:
        yield WorthLine("victim", _victim_text(victim, demand, view))
    actions = auction(replace(view, is_complete=False))
    if view.config.scaling is ScalingMode.ADVISE:
        yield WorthLine("why", "the scheduler only advises (scaling), and loads nothing beyond minimums")
    elif any(isinstance(action, Load) and action.model.version_id == demand.model.version_id for action in actions):
        yield WorthLine("why", "a slot is free: it loads now")
    elif view.now < demand.not_before:
        left = format_duration(demand.not_before - view.now)
        yield WorthLine("why", f"its last load failed; the next try is in {left}")
    elif not rest:
        yield WorthLine("why", "a slot that is being freed is reserved for it")
    elif victim is None:
        kept = "the minimums of other models keep all slots that could hold it"
        yield WorthLine("why", kept if view.reserved else "no slot of the pool could hold it now")
    else:
        why = _why_not(victim, demand, ledger, view)
        yield WorthLine("why", why or "the slot is taken at the next decision")


def _victim_text(victim: Ask, demand: Demand, view: View) -> str:
    instance = victim.instance
    worker = instance.worker_id
    if not is_of_tenant(instance, demand.model.name, view):
        return f"the slot on {worker}, of a model of another tenant"
    if demand.by_tenant:
        return f"the slot on {worker}, of {instance.model}"
    return (
        f"the slot on {worker}, of {instance.model}: it asks {victim.cost:.1f} late requests "
        f"against {victim.num_gained:.1f} saved"
    )


def _why_not(victim: Ask, demand: Demand, ledger: Ledger, view: View) -> str:
    """Why the model has not got the victim's slot; empty if nothing is in the way."""
    instance, waited_s = victim.instance, demand.oldest_wait_s
    turn_left_s = _turn_left_s(instance, view)
    why = []
    if instance not in ledger.idle:
        if waited_s < view.config.preempt_spare_after_s:
            after = format_duration(view.config.preempt_spare_after_s)
            why.append(f"it has waited {format_duration(waited_s)}, and a busy slot is taken after {after}")
        if instance.phase is not InstancePhase.READY:
            why.append("the model of that slot still loads")
        elif turn_left_s:
            why.append(f"the time slice of that slot ends in {format_duration(turn_left_s)}")
    left_s = longest_wait_s(demand, view.config) - demand.slot_wait_s
    if not victim.pays and left_s > 0:
        left = format_duration(left_s)
        why.append(f"the slot is worth more to its model; it is taken in {left} all the same")
    return "; ".join(why)
