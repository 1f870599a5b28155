"""Autoscaling: how many instances, in which slots, and whose slot when none is free."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scheduler.policy.autoscaling.listed_cluster import Slot, a_demand, a_view, crowded_demand
from tests.unit.scheduler.policy.paper_cluster import DECODE, PREFILL, a_copy, a_model, a_store, a_worker, an_instance
from torchrelay.scheduler.policy.autoscaling.actions import Drain, Load, SetRoles
from torchrelay.scheduler.policy.autoscaling.auction import auction
from torchrelay.scheduler.policy.autoscaling.minimums import Minimum
from torchrelay.scheduler.policy.autoscaling.slots import FreeSlot, FreeSlots, assign
from torchrelay.scheduler.policy.autoscaling.view import cover_both_roles
from torchrelay.scheduler.policy.storage_tiers import Tier
from torchrelay.scheduler.policy.types import BOTH, ROLES, InstancePhase, Role, Roles

MODEL = a_model()


def test_uncrowded_instance_is_drained_though_used() -> None:
    workers = [a_worker("w0"), a_worker("w1")]
    loads = [Slot(an_instance(MODEL, worker), 3 - n, last_active=100.0) for n, worker in enumerate(workers)]
    store = a_store("s1", "host-1")

    def drained(last_full_at: float, **changes: object) -> list[str]:
        demand = a_demand(MODEL, 0, last_full_at=last_full_at, **changes)
        actions = auction(a_view([demand], loads, workers, [store]))
        return [action.instance_id for action in actions if isinstance(action, Drain)]

    assert drained(last_full_at=30.0) == ["i-w1"]
    assert drained(last_full_at=50.0) == []
    assert drained(last_full_at=50.0, spare_s=20.0) == ["i-w1"]


@pytest.mark.parametrize(("num_cold", "drained"), [(0, ["i-w1"]), (3, [])])
def test_load_with_placed_requests_is_not_idle(num_cold: int, drained: list[str]) -> None:
    model, workers = a_model(), [a_worker("w0"), a_worker("w1")]
    serving = Slot(an_instance(model, workers[0]), 4)
    loading = Slot(an_instance(model, workers[1], phase=InstancePhase.LOADING), 0)
    demand = a_demand(model, num_waiting=0, num_cold=num_cold)
    actions = auction(a_view([demand], [serving, loading], workers, [a_store("s1", "host-1")]))
    assert [action.instance_id for action in actions if isinstance(action, Drain)] == drained


@given(st.lists(st.sampled_from([PREFILL, DECODE, BOTH]), max_size=8), st.integers(0, 3), st.integers(0, 3))
def test_assignments_have_no_half_pair_and_no_repeat(can: list[Roles], prefills: int, decodes: int) -> None:
    slots = [FreeSlot(f"w{n}", f"h{n % 2}", roles, Tier.REMOTE) for n, roles in enumerate(can)]
    chosen = assign(Counter({Role.PREFILL: prefills, Role.DECODE: decodes}), slots)
    playable_roles = {slot.worker_id: slot.playable_roles for slot in slots}
    assert len({slot.worker_id for slot in chosen}) == len(chosen)
    assert all(slot.roles <= playable_roles[slot.worker_id] for slot in chosen)
    num = {role: sum(role in slot.roles for slot in chosen) for role in Role}
    assert num[Role.PREFILL] <= prefills and num[Role.DECODE] <= decodes
    if prefills == decodes:
        assert num[Role.PREFILL] == num[Role.DECODE]
    if chosen and prefills and decodes:
        worker = a_worker("w")
        assert cover_both_roles(an_instance(a_model(), worker, slot.roles) for slot in chosen)


def cost_of_pair(pair: tuple[FreeSlot, FreeSlot]) -> tuple[object, ...]:
    prefill, decode = pair
    misfits = (prefill.preferred_role is Role.DECODE) + (decode.preferred_role is Role.PREFILL)
    avoided, apart = prefill.avoided or decode.avoided, prefill.host_id != decode.host_id
    return (avoided, apart, max(prefill.tier, decode.tier), misfits, prefill.cost, decode.cost)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([PREFILL, DECODE, BOTH]), st.integers(0, 3), st.booleans(), st.sampled_from([None, *Role])
        ),
        max_size=14,
    ),
    st.lists(st.sampled_from([Tier.HOST, Tier.PEER, Tier.REMOTE]), min_size=4, max_size=4),
)
def test_chosen_pair_costs_least(shapes: list[tuple[Roles, int, bool, Role | None]], tiers: list[Tier]) -> None:
    """Not all pairs are looked at: of slots of a host that are alike, two are enough."""
    slots = [
        FreeSlot(f"w{n:02}", f"h{host}", roles, tiers[host], avoided, preferred)
        for n, (roles, host, avoided, preferred) in enumerate(shapes)
    ]
    prefills = [slot for slot in slots if Role.PREFILL in slot.playable_roles]
    decodes = [slot for slot in slots if Role.DECODE in slot.playable_roles]
    pairs = [(prefill, other) for prefill in prefills for other in decodes if prefill is not other]
    chosen = assign(Counter(ROLES), slots)
    if any(slot.playable_roles >= BOTH for slot in slots):
        pairs = [pair for pair in pairs if (pair[0].preferred_role, pair[1].preferred_role) == tuple(Role)]
    if pairs:
        best = min(pairs, key=cost_of_pair)
        well = [slot.worker_id for slot in slots if slot.playable_roles >= BOTH and not slot.avoided]
        if well and (best[0].avoided or best[1].avoided):
            assert len(chosen) == 1 and chosen[0].roles == BOTH and chosen[0].worker_id in well
        else:
            assert tuple(slot.worker_id for slot in chosen) == tuple(slot.worker_id for slot in best)


def test_growth_leaves_slots_to_starving_models() -> None:
    crowded, waiting = a_model("acme/crowded"), a_model("acme/waiting")
    w1, w2, w3 = (
        a_worker("w1", playable_roles=PREFILL),
        a_worker("w2", playable_roles=DECODE),
        a_worker("w3", playable_roles=PREFILL),
    )
    loads = [Slot(an_instance(crowded, w1, PREFILL), 9), Slot(an_instance(crowded, w2, DECODE), 9)]
    store = a_store("s1", "host-1")
    demands = [crowded_demand(crowded), a_demand(waiting, 1)]
    assert auction(a_view(demands, loads, [w1, w2, w3], [store])) == ()  # w3 is half of what `waiting` needs
    alone = auction(a_view(demands[:1], loads, [w1, w2, w3], [store]))
    assert [action.assignments[0].worker_id for action in alone if isinstance(action, Load)] == []  # no pair for it
    free_decode = a_worker("w4", playable_roles=DECODE)
    both = auction(a_view(demands, loads, [w1, w2, w3, free_decode], [store]))
    assert [action.model.name for action in both if isinstance(action, Load)] == [waiting.name]


def test_partial_decision_leaves_slots_to_waiting_models() -> None:
    """An admission decided on its own model alone, and grew it into what a tick kept free for a model without any."""
    crowded, waiting = a_model("acme/crowded"), a_model("acme/waiting")
    workers = [a_worker(f"w{number}") for number in range(3)]
    demand, load = crowded_demand(crowded), Slot(an_instance(crowded, workers[0]), 9)
    alone = a_view([demand], [load], workers, [a_store("s1", "host-1")])
    assert [type(action) for action in auction(replace(alone, is_complete=False))] == [Load]
    beside = replace(alone, is_complete=False, waited_for=alone.waited_for | {waiting.version_id})
    assert auction(beside) == ()


def test_slots_need_store_with_free_space() -> None:
    model, other = a_model(), a_model("acme/other")
    pinned = replace(a_copy(other), num_pins=1)
    stores = {
        "small": a_store("s1", "small", arena_bytes=model.pack_bytes - 1),
        "pinned": a_store("s2", "pinned", [pinned], arena_bytes=2 * model.pack_bytes - 1),
        "evictable": a_store("s3", "evictable", [a_copy(other)], arena_bytes=2 * model.pack_bytes - 1),
        "there": a_store("s4", "there", [a_copy(model), pinned], arena_bytes=2 * model.pack_bytes),
    }
    workers = [a_worker(f"w {host_id}", host_id) for host_id in (*stores, "no store")]
    view = a_view([], workers=workers, stores=stores.values())
    slots = sorted(FreeSlots(view.instances, view.membership).of(model, frozenset(["w there"])))
    assert [(slot.worker_id, slot.tier, slot.avoided) for slot in slots] == [
        ("w evictable", Tier.PEER, False),
        ("w there", Tier.HOST, True),
    ]


def test_missing_role_is_set_if_no_slot_is_free() -> None:
    prefill, free = a_worker("w1"), a_worker("w2")
    load = Slot(an_instance(MODEL, prefill, PREFILL), 0)
    store = a_store("s1", "host-1")
    with_slot = auction(a_view([a_demand(MODEL)], [load], [prefill, free], [store]))
    assert [type(action) for action in with_slot] == [Load]
    without = auction(a_view([a_demand(MODEL)], [load], [prefill], [store]))
    assert [(type(action), action.roles) for action in without if isinstance(action, SetRoles)] == [(SetRoles, BOTH)]
    only_prefill = replace(prefill, playable_roles=PREFILL)
    assert auction(a_view([a_demand(MODEL)], [load], [only_prefill], [store])) == ()


def test_minimum_that_is_loaded_needs_no_expected_instance() -> None:
    model = a_model()
    demand = a_demand(model, 0, forecast=(-math.inf, math.inf))
    view = a_view([demand], workers=[a_worker("w1"), a_worker("w2")], stores=[a_store("s1", "host-1")])
    view = replace(view, minimums={model.version_id: Minimum(1)})
    assert [action.reason.cause for action in auction(view)] == ["minimum"]
