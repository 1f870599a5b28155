"""Evictions for a model without any slot: whose slot, when, and what is told of it; also if others fill the arena."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.scheduler.policy.autoscaling.listed_cluster import RULES, Slot, a_demand, a_view, crowded_demand
from tests.unit.scheduler.policy.paper_cluster import (
    DECODE,
    MB,
    PREFILL,
    PaperCluster,
    a_copy,
    a_model,
    a_pair,
    a_store,
    a_worker,
    an_instance,
)
from torchrelay.scheduler.policy.autoscaling.actions import Drain, SetRoles
from torchrelay.scheduler.policy.autoscaling.auction import auction
from torchrelay.scheduler.policy.autoscaling.minimums import Minimum
from torchrelay.scheduler.policy.autoscaling.view import View
from torchrelay.scheduler.policy.demand.demand import Demand
from torchrelay.scheduler.policy.storage_tiers import Tier
from torchrelay.scheduler.policy.types import BOTH, InstancePhase, Roles, StoreStatus, WorkerStatus

NOW = 1000.0
SLICE_S, LONGEST_S, SPARE_S = RULES.time_slice_s, RULES.longest_wait_s, RULES.preempt_spare_after_s
STORE = a_store("s", "host-1")
LEAVING: dict[str, Any] = {"phase": InstancePhase.DRAINING, "since": NOW - 1.0}


def slot(number: int, model: str, num_open: int = 0, roles: Roles = BOTH, **changes: Any) -> Slot:
    """The slot of worker ``w{number}``, with instance ``i{number}``. ``changes``: of the instance, or of its load."""
    of_load = {name: changes.pop(name) for name in Slot._fields if name in changes}
    changes = {"instance_id": f"i{number}", "since": 1.0, "confirmed": True, **changes}
    return Slot(an_instance(a_model(model), a_worker(f"w{number}"), roles, **changes), num_open, 1.0)._replace(
        **of_load
    )


def slots(model: str, number: int, num_open: int = 0, **changes: Any) -> list[Slot]:
    """Slots of models of the same tenant, one each."""
    return [slot(n, f"{model}{n}", num_open, **changes) for n in range(number)]


def waiting(name: str = "acme/new", wait_s: float = 0.1, number: int = 1, **changes: Any) -> Demand:
    return a_demand(a_model(name), number, oldest_wait_s=wait_s, **changes)


def crowded(name: str = "acme/crowded", backlog_s: float = 6.0, max_instances: int = 8, **changes: Any) -> Demand:
    return crowded_demand(a_model(name, max_instances=max_instances), 1, backlog_s=backlog_s, **changes)


def full_host(
    loads: Sequence[Slot],
    demands: Sequence[Demand],
    known: Sequence[Demand] = (),
    playable: Roles | None = None,
    free: Iterable[WorkerStatus] = (),
    workers: dict[str, Any] | None = None,
    stores: Sequence[StoreStatus] = (STORE,),
    **changes: Any,
) -> View:
    """All slots but ``free`` are taken. ``known``: demands of models that are not decided on; ``playable``: what the
    workers can play, if it is more than their instances do; ``workers``: changes of the first worker.
    """
    by_id = {
        load.instance.worker_id: a_worker(load.instance.worker_id, "host-1", playable or load.instance.roles)
        for load in loads
    }
    by_id["w0"] = replace(by_id["w0"], **(workers or {}))
    peers = [*by_id.values(), *free]
    waited_for = frozenset(demand.model.version_id for demand in demands)
    return a_view(demands, loads, peers, stores, NOW, known, keep_s=1e6, waited_for=waited_for, **changes)


def drains(*args: Any, **changes: Any) -> list[Drain]:
    return [action for action in auction(full_host(*args, **changes)) if isinstance(action, Drain)]


def drained(*args: Any, **changes: Any) -> list[str]:
    return [drain.instance_id for drain in drains(*args, **changes)]


def used(arrivals_per_s: float, num_open: int = 0, reload_s: float = 4.0, **changes: Any) -> list[Slot]:
    load = slot(0, "acme/used", num_open, last_active=NOW - 1.0, reload_s=reload_s, arrivals_per_s=arrivals_per_s)
    return [load._replace(**changes)]


def rated(*rates: float, **changes: Any) -> list[Slot]:
    """Busy slots of models with so many requests per second."""
    return [
        slot(n, f"acme/m{n}", 8, arrivals_per_s=rate, last_active=0.0, **(changes if n == len(rates) - 1 else {}))
        for n, rate in enumerate(rates)
    ]


def popular(arrivals_per_s: float) -> list[Slot]:
    return [slot(n, "acme/popular", 8, arrivals_per_s=arrivals_per_s, last_active=0.0) for n in (0, 1)]


def busy(num_open: int = 3, **changes: Any) -> list[Slot]:
    return [slot(0, "acme/busy", num_open, last_active=0.0, **changes)]


YOUNG: dict[str, Any] = {"since": NOW - SLICE_S + 1.0}
# Of each row: the slots, the demands, and the instances that are drained for them.
ROWS: dict[str, tuple[Sequence[Slot], Sequence[Demand], list[str]]] = {
    "unused model loses nothing": (used(0.0), [waiting()], ["i0"]),
    "gain below loss: models that were used in turns evicted each other at every request": (used(2.0), [waiting()], []),
    # Without its slot for 4 s, a model whose requests may wait for 2 s loses 4 + 4 x 2 log 2 = 9.5 of 2 per second.
    "gain below loss of 9.6": (used(2.0), [waiting(number=9)], []),
    "gain above loss of 9.6": (used(2.0), [waiting(number=10)], ["i0"]),
    "gain below a greater loss": (used(4.0), [waiting(number=19)], []),
    **{
        f"equal models with {rate} requests per second do not swap": (
            used(rate, reload_s=1.0, last_active=NOW),
            [waiting(arrivals_per_s=rate, load_s={Tier.HOST: 1.0})],
            [],
        )
        for rate in (0.7, 1.0, 5.0)
    },
    "least loss first": (
        [slot(0, "acme/0", last_active=NOW - 20.0, reload_s=30.0, arrivals_per_s=0.1),
         slot(1, "acme/1", last_active=NOW - 10.0, reload_s=3.0, arrivals_per_s=0.1)],
        [waiting()], ["i1"],
    ),
    # By its own target batch work is not late: it ended the turn of a model that is asked interactively.
    "batch work below the loss of a turn": (
        busy(arrivals_per_s=1.0, target_s=0.5), [waiting("acme/batch", 30.0, 30, target_s=600.0)], []
    ),
    "batch work above the loss of a turn": (
        busy(arrivals_per_s=1.0, target_s=0.5), [waiting("acme/batch", 30.0, 31, target_s=600.0)], ["i0"]
    ),
    # All requests of the timely model were late from then on.
    "a dozen late requests end no turn": (
        busy(reload_s=2.0, arrivals_per_s=1.5),
        [waiting("acme/late", 30.0, 12, target_s=1.0, load_s={Tier.HOST: 2.0})], [],
    ),
    "very many late requests end a turn": (
        busy(reload_s=2.0, arrivals_per_s=1.5),
        [waiting("acme/late", 30.0, 14, target_s=1.0, load_s={Tier.HOST: 2.0})], ["i0"],
    ),
    # Given up after a second whatever it was worth, it was loaded again as soon as the other was idle for a moment.
    "second slot with a loss, soon": (popular(20.0), [waiting(wait_s=SPARE_S)], []),
    "second slot with a loss, before a turn": (popular(20.0), [waiting(wait_s=SLICE_S - 0.1)], []),
    "second slot with a loss, after a turn": (popular(20.0), [waiting(wait_s=SLICE_S)], ["i0"]),
    "second slot without a loss, soon": (popular(0.05), [waiting(wait_s=SPARE_S)], ["i0"]),
    # A popular model lost its slot, as that of another had just been taken.
    "overdue, cheapest slot is young": (rated(20.0, 5.0, **YOUNG), [waiting(wait_s=LONGEST_S)], []),
    "overdue, cheapest slot loads": (
        rated(20.0, 5.0, phase=InstancePhase.LOADING, since=NOW - SLICE_S - 1.0), [waiting(wait_s=LONGEST_S)], []
    ),
    "overdue, cheapest slot is old": (rated(20.0, 5.0, since=NOW - SLICE_S), [waiting(wait_s=LONGEST_S)], ["i1"]),
    "overdue for a turn, cheapest slot was taken by another overdue model": (
        rated(20.0, 5.0, **YOUNG), [waiting(wait_s=LONGEST_S + SLICE_S)], ["i0"]
    ),
    # The model waited for the cheapest slot, for up to 70 s.
    **{
        f"older slot that pays goes before a cheaper one that is {phase.value} and young": (
            rated(0.5, 0.1, phase=phase, **YOUNG), [waiting(wait_s=SLICE_S, number=30)], ["i0"]
        )
        for phase in (InstancePhase.READY, InstancePhase.LOADING)
    },
    # Batch work that was not due for nine more minutes ended the turn of a model with 50 requests per second.
    **{
        f"longest wait, target {target_s:g} s, waited {wait_s:g} s, {num_open} open": (
            used(50.0, num_open), [waiting(wait_s=wait_s, target_s=target_s)], ["i0"] * (wait_s >= longest_s)
        )
        for target_s, longest_s in ((2.0, LONGEST_S), (600.0, 600.0))
        for wait_s in (longest_s - 1.0, longest_s)
        for num_open in (0, 1)
    },
    # While any slot of the cluster was being freed, no busy model gave one up.
    "a slot that is freed elsewhere serves one of two": (
        [*(slot(n, "acme/crowded", 1) for n in (0, 1)), slot(2, "acme/other", **LEAVING)],
        [waiting("acme/first", 5.0), waiting("acme/second", 4.0)], ["i0"],
    ),
    "a slot that is freed is enough for one": (
        [*(slot(n, "acme/crowded", 1) for n in (0, 1)), slot(2, "acme/other", **LEAVING)],
        [waiting("acme/first", 5.0)], [],
    ),
    # A worker that went on draining held up every model that could have used its slot.
    "overrun drain is not counted": (
        [slot(0, "acme/0", phase=InstancePhase.DRAINING, since=NOW - 100.0), slot(1, "acme/1")], [waiting()], ["i1"]
    ),
    # Several slots at once: of a model that could do without each of them alone
    "split model with two instances of each role": (
        [slot(n, "acme/busy", 1, PREFILL if n < 2 else DECODE) for n in range(4)], [waiting(wait_s=SLICE_S + 1.0)],
        ["i0", "i2"],
    ),
    "tenant with several split models, for a tenant without a slot": (
        [slot(n, f"birch/{n // 2}", 1, DECODE if n % 2 else PREFILL, tenants=frozenset({"birch"})) for n in range(4)],
        [waiting(wait_s=SLICE_S + 1.0)], ["i0", "i1"],
    ),
    # An overdue model waited for a cheaper slot whose time slice went on, although this one paid.
    **{
        f"slot that pays goes before a cheaper young one, waited {wait_s:g} s": (
            rated(0.3, 0.0, **YOUNG), [waiting(wait_s=wait_s, number=20)], ["i0"]
        )
        for wait_s in (LONGEST_S - 1.0, LONGEST_S + 1.0)
    },
    # Growth into idle slots
    "short queue grows into no idle slot": (
        [slot(0, "acme/crowded", 9), slot(1, "acme/idle", last_active=NOW - 60.0, reload_s=3.0)],
        [crowded(backlog_s=0.4)], [],
    ),
    **{
        f"long queue, idle model with {rate} requests per second": (
            [slot(0, "acme/crowded", 9),
             slot(1, "acme/idle", last_active=NOW - 60.0, reload_s=3.0, arrivals_per_s=rate)],
            [crowded()], ["i1"] * (rate < 0.1),
        )
        for rate in (0.0, 0.01, 0.1)  # with 0.1 it would take the slot back after a second: each lost two loads
    },
    "expected model keeps one idle slot": (
        [slot(0, "acme/crowded", 9),
         *(slot(n, "acme/idle", last_active=NOW - 60.0, arrivals_per_s=0.1) for n in (1, 2))],
        [crowded(backlog_s=60.0, max_instances=3)], ["i1"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("loads", "demands", "expected"), ROWS.values(), ids=ROWS)
def test_whose_slot_is_drained(loads: Sequence[Slot], demands: Sequence[Demand], expected: list[str]) -> None:
    assert drained(loads, demands) == expected


def after(loads: Iterable[Slot], leaving: Iterable[str]) -> list[Slot]:
    """The slots once the instances drain."""
    draining = {"phase": InstancePhase.DRAINING, "since": NOW}
    return [
        load._replace(instance=replace(load.instance, **draining)) if load.instance.instance_id in leaving else load  # type: ignore[arg-type]
        for load in loads
    ]


def test_repeated_decisions_drain_slots_once() -> None:
    """Any slot that was leaving, for whomever, ended the search; and with workers of one role each, every decision
    drained two more, as none of them alone was enough.
    """
    apart = [slot(n, f"acme/{n // 2}", 0, DECODE if n % 2 else PREFILL) for n in range(16)]
    many = [waiting(f"acme/new {number}") for number in range(6)]
    grown = [slot(0, "acme/crowded", 1), *(slot(n, f"acme/{n}") for n in range(1, 5))]
    of_tenants = [slot(n, f"t{n}/busy", 1, tenants=frozenset({f"t{n}"})) for n in range(5)]
    for loads, demands, num_drained in (
        (apart, [waiting()], 2),
        (slots("acme/", 8), many, 6),
        (grown, [crowded(max_instances=3)], 2),
        (of_tenants, [waiting(wait_s=5.0, number=5)], 1),
    ):
        leaving: list[str] = []
        for _ in range(4):
            leaving += drained(after(loads, leaving), demands)
        assert len(set(leaving)) == len(leaving) == num_drained


@pytest.mark.parametrize("roles", [[BOTH], [PREFILL, DECODE], [BOTH] * 3], ids=["alone", "apart", "three"])
def test_busy_model_filling_arena_ends_its_turn(roles: list[Roles]) -> None:
    """Only with space for both packs was its slot usable; else who waited, waited until it was idle."""
    model, loads = a_model("acme/busy"), [slot(n, "acme/busy", 1, each) for n, each in enumerate(roles)]
    pinned = replace(a_copy(model), num_pins=len(roles))
    small = a_store("s", "host-1", [pinned], arena_bytes=model.pack_bytes + MB)
    assert drained(loads, [waiting(wait_s=SLICE_S + 1.0)], stores=[small]) == [
        load.instance.instance_id for load in loads
    ]


def test_overdue_model_takes_slot_that_holds_it_although_another_slot_pays() -> None:
    """Only slots that paid were considered while there was any, so a model of two devices waited for ever."""
    loads = [slot(0, "acme/large", 1, arrivals_per_s=50.0), slot(1, "acme/small", 1)]
    demand = Demand(a_model("acme/new", num_devices=2), 1, 0, LONGEST_S)
    assert drained(loads, [demand], workers={"num_devices": 2}) == ["i0"]


@pytest.mark.parametrize("num_open", [0, 1], ids=["idle", "busy"])
def test_tenant_takes_one_overdue_slot_per_turn(num_open: int) -> None:
    """Its 64 models with a request a minute each took as many slots of others."""
    loads = slots("birch/", 6, num_open, last_active=NOW - 1.0, reload_s=4.0, arrivals_per_s=50.0)
    late = [waiting(f"acme/{number}", LONGEST_S + number) for number in range(4)]
    shared = waiting("acme/new", 100.0, by_tenant={"acme": (1, 0), "birch": (0, 1), "cedar": (1, 0)})
    for demands, taken_at, tenants in (
        ([*late, waiting("cedar/new", 100.0)], {"acme": NOW - SLICE_S}, ["cedar", "acme"]),
        ([*late, waiting("cedar/new", 100.0)], {"acme": NOW - SLICE_S + 0.1}, ["cedar"]),
        ([shared], {"acme": NOW}, ["cedar"]),
        ([shared], {"acme": NOW, "cedar": NOW}, []),
    ):
        assert [drain.overdue_tenant for drain in drains(loads, demands, overdue_slots_at=taken_at)] == tenants
    profitable = drains(slots("birch/", 4, 1), [waiting(f"acme/{number}", 100.0) for number in range(4)])
    assert [drain.overdue_tenant for drain in profitable] == [""] * 4, "a slot that pays counts against no tenant"


def test_instance_of_a_model_that_cannot_serve_goes_soon() -> None:
    half = [slot(0, "acme/half", 1, PREFILL, arrivals_per_s=50.0, since=NOW - 2.0)]
    assert drained(half, [waiting(wait_s=0.5)], playable=BOTH) == []
    assert drained(half, [waiting(wait_s=SPARE_S)], playable=BOTH) == ["i0"]


def test_second_slot_that_is_due_counts_against_no_tenant() -> None:
    (drain,) = drains(popular(50.0), [waiting(wait_s=LONGEST_S + 1.0)])
    assert (drain.reason.cause, drain.overdue_tenant) == ("preempt_spare", "")


def test_tenant_with_a_free_slot_takes_no_slot_of_another_tenant() -> None:
    flood = slots("acme/", 3, 1, last_active=NOW, reload_s=4.0, arrivals_per_s=50.0, tenants=frozenset({"acme"}))
    waits, free = [waiting("birch/a", 5.0), waiting("birch/b", 4.0)], [a_worker("w3", "host-1")]
    assert len(drained(flood, waits)) == 1
    assert drained(flood, waits, free=free) == []
    shared = waiting("birch/shared", 5.0, by_tenant={"birch": (1, 0), "cedar": (1, 0)})
    assert drained(flood, [shared, waiting("cedar/b", 4.0)], free=free) == [], "its load counts for both tenants"


def grown(model: str, load: float, **changes: Any) -> Demand:
    fields: dict[str, Any] = {"arrivals_per_s": 1000.0, "late_s": 3600.0, "target_s": 2.0}
    return Demand(a_model(model, max_instances=8), 0, 0, 0.0, load=load, **(fields | changes))


@pytest.mark.parametrize(("load", "grows"), [(0.9, True), (1.5, False), (29.0, False), (58.0, False)])
def test_short_models_do_not_swap_slots(load: float, grows: bool) -> None:
    """Two that were predicted to need three times what they had loaded each other's idle instances dozens of times a
    second: a gain by the hour squared was compared with a loss by its logarithm.
    """
    rates: dict[str, Any] = {"last_active": NOW - 0.1, "arrivals_per_s": 1000.0, "reload_s": 0.03}
    loads = [slot(n, f"acme/{n // 2}", int(n == 0), **rates) for n in range(4)]
    assert drained(loads, [grown("acme/0", 29.0)], [grown("acme/1", load)]) == (["i2"] if grows else [])


@pytest.mark.parametrize(("loads", "num_left"), [((3.05, 2.2), 3), ((29.0, 28.0), 4), ((5.0, 4.9), 4), ((9.0, 0.5), 1)])
def test_growth_slots_are_not_reclaimed_by_other_model(loads: tuple[float, float], num_left: int) -> None:
    demands = [grown(f"acme/{number}", load) for number, load in enumerate(loads)]
    owners = [0, 1, 1, 1, 1, 1]

    def taken(taker: int) -> list[int]:
        owned = [
            slot(n, f"acme/{owner}", last_active=NOW - 0.1, arrivals_per_s=1000.0) for n, owner in enumerate(owners)
        ]
        return [int(item.removeprefix("i")) for item in drained(owned, [demands[taker]], demands)]

    for number in taken(0):
        owners[number] = 0
    assert owners.count(1) == num_left
    assert taken(0) == taken(1) == []


def test_minimum_takes_both_slots_of_idle_split_model() -> None:
    """The loss of a model by its last instance of a role was computed, which divided by zero."""
    kept, idle = Demand(a_model("acme/kept"), 0, 0, 0.0), Demand(a_model("acme/idle"), 0, 0, 0.0, load=1.0)
    loads = [slot(0, "acme/idle", 0, PREFILL), slot(1, "acme/idle", 0, DECODE)]
    assert drained(loads, [kept], [idle], minimums={kept.model.version_id: Minimum(1)}) == ["i0", "i1"]


def test_surplus_instance_of_role_costs_nothing() -> None:
    roles = [PREFILL, PREFILL, PREFILL, DECODE, DECODE]
    loads = [slot(0, "acme/crowded", 1), *(slot(n, "acme/other", 0, each) for n, each in enumerate(roles, 1))]
    first, second = (
        Demand(a_model(name, max_instances=4), 0, 0, 0.0, arrivals_per_s=100.0, load=load, target_s=2.0)
        for name, load in (("acme/crowded", 1.5), ("acme/other", 3.0))
    )
    assert drained(loads, [first], [second], playable=BOTH) == ["i1"]


def test_growth_load_time_is_by_nearest_tier() -> None:
    """Without a free slot each was expected to load over the network: from RAM in a second, yet its queue just grew."""
    loads, demand = (
        [slot(0, "acme/crowded", 1), slot(1, "acme/idle")],
        crowded(load_s={Tier.HOST: 1.0, Tier.PEER: 100.0}),
    )
    far = [STORE, a_store("o", "host-2", [a_copy(demand.model)])]
    near = [a_store("s", "host-1", [a_copy(demand.model)])]
    assert drained(loads, [demand], stores=far) == []
    assert drained(loads, [demand], stores=near) == ["i1"]


def test_model_gives_up_one_slot_per_decision() -> None:
    loads = [slot(0, "acme/crowded", 1, PREFILL), slot(1, "acme/crowded", 1, DECODE)]
    actions = auction(full_host(loads, [waiting("acme/first", 5.0), waiting("acme/second", 4.0)], playable=BOTH))
    assert [(type(action), action.instance_id) for action in actions if not hasattr(action, "model")] == [
        (SetRoles, "i1"),
        (Drain, "i0"),
    ]


def test_predicted_reload_is_at_most_the_load() -> None:
    """At the default rate 40 GB take ten seconds, for which a waiting model was kept from an idle one's slot."""
    scene = PaperCluster().settle(a_store("store-1", "host-1", arena_bytes=100_000 * MB), a_worker("w-a"))
    scene.admit(a_model("acme/first", pack_bytes=40_000 * MB), "r1")
    scene.pass_time(0.5)
    scene.finish_loads()
    scene.release("r1")
    scene.admit(a_model("acme/second", pack_bytes=40_000 * MB), "r2")
    scene.pass_time(1.0)
    assert scene.placement("r2") is not None


def test_starving_model_comes_before_growth() -> None:
    loads = [slot(0, "acme/idle", last_active=NOW - 12.0, reload_s=4.0), slot(1, "acme/crowded", 9)]
    (drain,) = drains(loads, [crowded(oldest_wait_s=5.0), waiting()])
    assert drain.reason.cause == "evict" and "has waited" in drain.reason.text


def report_pins(scene: PaperCluster, store_id: str) -> None:
    """The store pins what is in a slot, as its workers hold it."""
    models = {model.pack_id: model for model in scene.models.values()}
    packs = [worker.slot.pack_id for worker in scene.workers.values() if worker.slot.phase is not InstancePhase.FREE]
    copies = {pack_id: replace(a_copy(models[pack_id]), num_pins=packs.count(pack_id)) for pack_id in packs}
    scene.stores[store_id] = replace(scene.stores[store_id], copies=copies)


def test_idle_models_free_arena_they_fill() -> None:
    first, second = a_model("acme/first"), a_model("acme/second")
    arena = first.pack_bytes + second.pack_bytes - MB
    scene = PaperCluster().settle(a_store("store-1", "host-1", arena_bytes=arena), *a_pair("w-a", "w-b"))
    scene.serve(first, "r1")
    report_pins(scene, "store-1")
    scene.admit(second, "r2")
    scene.pass_time(3.0)
    assert scene.placement("r2") is None and "drain" not in scene.kinds()  # r1 runs, and its weights are in the way
    scene.release("r1")
    for _ in range(10):
        report_pins(scene, "store-1")
        scene.pass_time(0.1)
    assert scene.placement("r2") is not None


def told(*args: Any, **changes: Any) -> list[str]:
    return [drain.reason.text for drain in drains(*args, **changes)]


def test_eviction_reason_names_figures_and_no_counts_of_other_tenants() -> None:
    idle = slot(0, "acme/idle", last_active=NOW - 12.0, reload_s=4.0, tenants=frozenset(("acme",)))
    crowd = slot(1, "acme/crowded", 9)
    again = "to load it again takes 4 s"
    assert told([idle], [waiting()]) == [
        f"idle for 12 s, and acme/new has waited 100 ms for a slot; {again} (0.0 late requests)"
    ]
    assert told([idle, crowd], [crowded()]) == [
        f"idle for 12 s, and acme/crowded saves 147.9 late requests; {again} (0.0 late requests)"
    ]
    (drain,) = drains([idle, crowd], [crowded(oldest_wait_s=5.0), waiting()])
    assert drain.reason.cause == "evict" and "grow" not in drain.reason.text, "a starving model comes before growth"
    assert told([slot(n, "birch/busy", 1) for n in (0, 1)], [waiting(wait_s=1.25)]) == [
        "a model of another tenant has waited 1.25 s for a slot, and this model can do without one; without it 0.0 "
        "requests of this model are late"
    ]
    assert told([slot(0, "birch/busy", 1, since=NOW - 30.0)], [waiting(wait_s=11.5)]) == [
        "a model of another tenant has waited 11.5 s, and no slot can be spared; this one was held for 30 s; "
        "without it 0.0 requests of this model are late"
    ]
    other, crowd = crowded("birch/crowded"), slot(1, "birch/crowded", 9)
    text = f"idle for 12 s, and a model of another tenant needs more instances; {again}"
    assert told([idle, crowd], [other]) == [f"{text} (0.0 late requests)"]
    shared = idle._replace(tenants=frozenset(("acme", "cedar")))
    assert told([shared, crowd], [other]) == [text]
