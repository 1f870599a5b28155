"""Prefill and decode sized apart: each role gets and gives back instances by its own work, or one of the other role,
if that can spare it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.scheduler.policy.autoscaling.listed_cluster import Slot, a_demand, a_view, answers, crowded_demand
from tests.unit.scheduler.policy.invariants import order_roles
from tests.unit.scheduler.policy.paper_cluster import (
    DECODE,
    MB,
    PREFILL,
    PaperCluster,
    a_model,
    a_slot,
    a_store,
    a_worker,
    an_instance,
    one_host,
)
from tests.unit.scheduler.policy.running_cluster import SERVED, RunningCluster
from torchrelay.common.latency.latency_model import LatencyModel, StepCost
from torchrelay.scheduler.policy.autoscaling.actions import Action, Drain, Load, SetRoles
from torchrelay.scheduler.policy.autoscaling.auction import auction
from torchrelay.scheduler.policy.autoscaling.view import cover_both_roles
from torchrelay.scheduler.policy.config import PolicyConfig, PoolMode
from torchrelay.scheduler.policy.demand.demand import Demand
from torchrelay.scheduler.policy.effects import Recall
from torchrelay.scheduler.policy.handlers import views
from torchrelay.scheduler.policy.inputs import CommandEnded, CommandOutcome, FirstToken, Release, RoleChange
from torchrelay.scheduler.policy.prediction import Outcome
from torchrelay.scheduler.policy.types import (
    AttemptKey,
    InstancePhase,
    LatencyTargets,
    Placement,
    Pool,
    Role,
    Roles,
    WorkerStatus,
)

MODEL = a_model(max_instances=2)
STORE = a_store("s1", "host-1")
TWO_PREFILLS = {"p0": PREFILL, "p1": PREFILL, "d": DECODE}
TWO_DECODES = {"d0": DECODE, "d1": DECODE, "p": PREFILL}
DECODE_SHORT = a_demand(MODEL, 0, arrivals_per_s=2.0, load=0.1, last_full_at=80.0, decode=answers(20, 2.0))
PREFILL_SHORT = crowded_demand(MODEL, 60, load_s={}, decode=answers(2, 0.2, last_full_at=80.0))


def decided(
    demand: Demand,
    playing: Mapping[str, Roles],
    num_free: int = 0,
    changes: Mapping[str, Mapping[str, object]] | None = None,
    workers: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Action]:
    """``changes``: of the instances, by worker."""
    slots = [replace(a_worker(name), **(workers or {}).get(name, {})) for name in playing]
    loads = [
        Slot(
            replace(an_instance(MODEL, worker, playing[worker.worker_id]), **(changes or {}).get(worker.worker_id, {})),  # type: ignore[arg-type]
            num_open=number,
            last_active=100.0,
        )
        for number, worker in enumerate(slots, 3)
    ]
    free = [a_worker(f"free-{number}") for number in range(num_free)]
    return list(auction(a_view([demand], loads, [*slots, *free], [STORE])))


def changed(actions: list[Action]) -> dict[str, Roles]:
    assert not any(isinstance(action, Drain) for action in actions)
    return {action.instance_id: action.roles for action in actions if isinstance(action, SetRoles)}


def roles_woken(actions: list[Action]) -> list[Roles]:
    return [assignment.roles for action in actions if isinstance(action, Load) for assignment in action.assignments]


def test_held_answers_need_no_more_instances() -> None:
    assert answers(10, 1.0).fluid.num_saved(1, 5.0) == 0
    assert answers(5, 0.5).fluid.num_saved(1, 0.0) == 0
    # The queue grows by half a second of work per second from nothing: after 4 s a target of 2 s is exceeded.
    assert answers(10, 1.5).fluid.num_saved(1, 0.0) == pytest.approx(1.5 * 15 * math.log(15) / 0.25)
    assert answers(10, 1.5).fluid.num_saved(2, 0.0) == 0
    assert answers(30, 1.0).fluid.num_saved(1, 0.0) > answers(20, 1.0).fluid.num_saved(1, 0.0) > 1


def test_only_lacking_role_grows() -> None:
    pair = {"p": PREFILL, "d": DECODE}
    busy_decode = a_demand(MODEL, 0, arrivals_per_s=2.0, load=0.1, decode=answers(20, 2.0))
    actions = decided(busy_decode, pair, num_free=2)
    assert roles_woken(actions) == [DECODE]
    assert isinstance(actions[0], Load) and actions[0].reason.text.startswith(
        "1 prefill and 2 decode wanted (20 answers, 10 on each): the"
    )
    busy_prefill = crowded_demand(MODEL, 60, load_s={}, decode=answers(2, 0.2))
    assert roles_woken(decided(busy_prefill, pair, num_free=1)) == [PREFILL]
    busy_both = crowded_demand(MODEL, 60, load_s={}, decode=answers(20, 2.0))
    assert roles_woken(decided(busy_both, pair, num_free=2)) == [DECODE, PREFILL], "what saves more first"
    assert roles_woken(decided(busy_both, pair, num_free=1)) == [DECODE]


def test_only_spare_role_shrinks() -> None:
    playing = {"p0": PREFILL, "p1": PREFILL, "d0": DECODE, "d1": DECODE}

    def drained(prefill_crowded_at: float, decode_last_full_at: float) -> list[str]:
        decode = answers(8, 0.8, last_full_at=decode_last_full_at)
        demand = a_demand(MODEL, 0, last_full_at=prefill_crowded_at, arrivals_per_s=0.8, load=0.4, decode=decode)
        return [item.instance_id for item in decided(demand, playing, num_free=2) if isinstance(item, Drain)]

    assert drained(prefill_crowded_at=90.0, decode_last_full_at=30.0) == ["i-d0"]
    assert drained(prefill_crowded_at=30.0, decode_last_full_at=90.0) == ["i-p0"]
    assert drained(prefill_crowded_at=30.0, decode_last_full_at=30.0) == ["i-p0", "i-d0"]
    assert drained(prefill_crowded_at=90.0, decode_last_full_at=90.0) == []


def test_short_role_gets_the_least_busy_instance_of_the_other() -> None:
    (change,) = decided(DECODE_SHORT, TWO_PREFILLS)
    assert isinstance(change, SetRoles) and (change.instance_id, change.roles) == ("i-p0", DECODE)
    assert change.reason.cause == "role_short"
    assert change.reason.text.startswith("decode needs this instance more than prefill: ")
    assert change.reason.text.endswith(" late requests saved, 0.0 lost")
    assert changed(decided(PREFILL_SHORT, TWO_DECODES)) == {"i-d0": PREFILL}


@pytest.mark.parametrize(("demand", "playing"), [(DECODE_SHORT, TWO_PREFILLS), (PREFILL_SHORT, TWO_DECODES)])
def test_role_change_comes_before_a_load(demand: Demand, playing: dict[str, Roles]) -> None:
    actions = decided(demand, playing, num_free=2)
    assert len(changed(actions)) == 1 and not roles_woken(actions)
    assert len(roles_woken(decided(demand, {"p": PREFILL, "d": DECODE}, num_free=2))) == 1


def test_instance_that_the_other_role_needs_stays() -> None:
    is_needed = replace(DECODE_SHORT, load=1.1, backlog_s=0.5)
    actions = decided(is_needed, TWO_PREFILLS, num_free=1)
    assert not changed(actions) and len(roles_woken(actions)) == 1, (
        "there is a slot, and prefill would lose by the change"
    )
    assert changed(decided(is_needed, TWO_PREFILLS)) == {"i-p0": DECODE}, "decode gains more than twice as much"
    as_much = replace(DECODE_SHORT, load=3.0, backlog_s=90.0, arrivals_per_s=20.0)
    assert not changed(decided(as_much, TWO_PREFILLS))
    assert not changed(decided(replace(DECODE_SHORT, last_full_at=95.0), TWO_PREFILLS)), "it was needed a moment ago"
    enough = replace(DECODE_SHORT, decode=answers(5, 0.5, last_full_at=99.0))
    assert decided(enough, TWO_PREFILLS) == [], "decode lacks nothing"
    assert not changed(decided(replace(DECODE_SHORT, decode=None), TWO_PREFILLS)), "roles are not sized apart"


@pytest.mark.parametrize(
    "changes",
    [{"roles_since": 91.0}, {"since": 91.0}, {"roles_retry_at": 101.0}, {"phase": InstancePhase.LOADING}],
    ids=["changed roles", "was loaded", "could not change", "loads"],
)
def test_instance_keeps_its_roles_for_a_turn(changes: dict[str, object]) -> None:
    both = {"p0": changes, "p1": changes}
    assert not changed(decided(DECODE_SHORT, TWO_PREFILLS, changes=both))
    later = {name: value - 1.5 if isinstance(value, float) else value for name, value in changes.items()}
    is_loading = "phase" in changes
    assert bool(changed(decided(DECODE_SHORT, TWO_PREFILLS, changes={"p0": later, "p1": later}))) is not is_loading


def test_last_loaded_instance_and_largest_pool_keep_their_role() -> None:
    assert not changed(decided(DECODE_SHORT, TWO_PREFILLS, changes={"p1": {"phase": InstancePhase.LOADING}}))
    assert not changed(decided(DECODE_SHORT, {"p0": PREFILL, "d": DECODE}))
    large = {"d0": {"kv_pool_bytes": 128 * MB}}
    assert changed(decided(PREFILL_SHORT, TWO_DECODES, workers=large)) == {"i-d1": PREFILL}
    apart = {"p0": {"playable_roles": PREFILL}, "p1": {"playable_roles": PREFILL}}
    assert not changed(decided(DECODE_SHORT, TWO_PREFILLS, workers=apart)), "their workers cannot decode"


@given(
    playing=st.lists(st.sampled_from([PREFILL, DECODE]), min_size=2, max_size=6),
    num_open=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    times=st.lists(st.sampled_from([0.0, 30.0, 95.0]), min_size=12, max_size=12),
    phases=st.lists(st.sampled_from([InstancePhase.LOADING, *[InstancePhase.READY] * 4]), min_size=6, max_size=6),
    num_answers=st.integers(1, 60),
    rate=st.sampled_from([0.1, 1.0, 3.0]),
    load=st.sampled_from([0.01, 0.5, 2.5]),
    num_waiting=st.sampled_from([0, 0, 1, 50]),
    crowded=st.tuples(st.sampled_from([0.0, 95.0]), st.sampled_from([0.0, 95.0])),
    num_free=st.integers(0, 2),
)
def test_no_decision_leaves_a_model_without_a_role(
    playing: list[Roles], num_open: list[int], times: list[float], phases: list[InstancePhase], num_answers: int,
    rate: float, load: float, num_waiting: int, crowded: tuple[float, float], num_free: int,
) -> None:  # fmt: skip
    """Role changes, evictions for another model and the drains of spare instances, in one decision."""
    other = a_model("acme/other")
    workers = [a_worker(f"w{number}") for number in range(len(playing))]
    instances = [
        replace(an_instance(MODEL, worker, playing[n], phases[n]), since=times[n], roles_since=times[-1 - n])
        for n, worker in enumerate(workers)
    ]
    loads = [Slot(instance, num_open[n], last_active=30.0, reload_s=1.0) for n, instance in enumerate(instances)]
    demand = a_demand(
        MODEL, num_waiting, arrivals_per_s=rate, load=load, backlog_s=num_waiting / 10, last_full_at=crowded[0],
        decode=answers(num_answers, rate, last_full_at=crowded[1]),
    )  # fmt: skip
    growing = crowded_demand(other, 60)
    home = a_worker("home")
    free = [a_worker(f"free-{number}") for number in range(num_free)]
    loads.append(Slot(an_instance(other, home), 9, last_active=100.0))
    actions = auction(a_view([demand, growing], loads, [*workers, home, *free], [STORE]))
    if any(load.num_open for load in loads[:-1]) and cover_both_roles(instances):
        after = {instance.instance_id: instance for instance in instances}
        for action in actions:
            if isinstance(action, Drain):
                after.pop(action.instance_id, None)
            elif isinstance(action, SetRoles):
                after[action.instance_id] = replace(after[action.instance_id], pending_roles=action.roles)
        if any(isinstance(action, SetRoles) for action in actions):
            assert cover_both_roles(after.values())
            ready = [each for each in after.values() if each.phase is InstancePhase.READY]
            before = [each for each in instances if each.phase is InstancePhase.READY]
            assert cover_both_roles(ready) or not cover_both_roles(before)


# In a cluster


def latency_of(prompt_token_s: float, step_s: float, answer_s: float) -> LatencyModel:
    """Of an engine whose steps take so long, and so much longer for each answer."""
    prefill = StepCost(per_position_s=prompt_token_s, num_steps=100)
    return LatencyModel(prefill, StepCost(base_s=step_s, per_position_s=answer_s, num_steps=100), token_budget=2048)


def apart(num_decode: int = 1) -> PaperCluster:
    """A prefill worker, decode workers whose pools hold three answers each, and a free one of each kind."""
    latency = latency_of(1e-5, 0.05, 0.001)
    pool = 3 * 160 * MODEL.kv_bytes_per_token
    decodes = [
        a_worker(f"d{number}", "host-1", DECODE, kv_pool_bytes=pool, latency=latency)
        for number in range(num_decode + 1)
    ]
    prefills = [a_worker(f"p{number}", "host-1", PREFILL, latency=latency) for number in range(2)]
    return one_host(*prefills, *decodes)


def learn_length(scene: PaperCluster, num_tokens: int) -> None:
    """Ends eight answers of that length."""
    for number in range(8):
        scene.serve(MODEL, f"first-{number}")
        scene.apply(FirstToken(AttemptKey(f"first-{number}", 1)))
        scene.pass_time(0.5)
        outcome = Outcome(ttft_s=0.01, tbt_s=0.02, num_output_tokens=num_tokens, ended_at=scene.now)
        scene.apply(Release(AttemptKey(f"first-{number}", 1), True, outcome))


def with_slow_tokens(num_workers: int, config: PolicyConfig) -> PaperCluster:
    """An instance with thirty long answers at once and no queue, on the first of the workers."""
    latency = latency_of(1e-5, 0.02, 0.01)
    workers = [a_worker(f"w{number}", "host-1", latency=latency) for number in range(num_workers)]
    scene = PaperCluster(config).settle(a_store("store-1", "host-1"), *workers)
    learn_length(scene, 500)
    for number in range(30):  # tokens of more than eight answers are over 100 ms apart
        scene.admit(MODEL, f"r-{number}", max_tokens=500)
        assert scene.placement(f"r-{number}") is not None
        scene.apply(FirstToken(AttemptKey(f"r-{number}", 1)))
        assert not scene.policy.state.queues.num_waiting(MODEL.version_id)
    scene.pass_time(1.0)
    scene.check()
    return scene


def test_slow_tokens_add_instance_that_plays_both_roles() -> None:
    """Only prompts were counted: long answers without a queue missed their target until the KV pool was full."""
    assert len(list(with_slow_tokens(2, PolicyConfig()).policy.state.instances)) == 2


def test_slow_tokens_raise_the_target_of_the_pool() -> None:
    """Only models with waiting requests counted, so no launcher started a slot for long answers."""
    target = with_slow_tokens(1, PolicyConfig(pool_mode=PoolMode.ADVISE)).policy.state.pool_targets[Pool(1)]
    assert target.num_slots == 1 and target.num_wanted == MODEL.max_instances, target.reason


def test_full_pools_get_decode_instance_only() -> None:
    scene = apart()
    learn_length(scene, 50)
    for number in range(12):
        scene.admit(MODEL, f"r-{number}")
        if scene.placement(f"r-{number}"):
            scene.apply(FirstToken(AttemptKey(f"r-{number}", 1)))
    demand = next(demand for demand in views.view_of(scene.policy.state, scene.now).demands)
    assert demand.decode is not None and (demand.decode.num_answers, demand.decode.num_held) == (12, 3)
    # Nine prompts of 1 ms wait; the instance that is being loaded has places for three of them.
    assert demand.backlog_s == pytest.approx(0.002), "what waits for a place to decode is not a queue of prompts"
    scene.pass_time(20.0)
    scene.finish_loads()
    scene.pass_time(1.0)
    playing = [role for instance in scene.policy.state.instances for role in instance.target_roles]
    assert sorted(playing) == [Role.PREFILL, Role.DECODE, Role.DECODE]
    scene.check()

    scene.policy.state.note_model(replace(MODEL, targets=LatencyTargets(tbt_target_s=0.0415)), scene.now)
    demand = next(demand for demand in views.view_of(scene.policy.state, scene.now).demands)
    assert demand.decode is not None and demand.decode.num_held == 2, "the tokens of three are 42 ms apart"


# What an order causes

LATENCY = latency_of(1e-3, 0.02, 0.002)


def ready(worker_id: str, roles: Roles) -> WorkerStatus:
    return a_worker(worker_id, slot=a_slot(MODEL, f"i of {worker_id}", roles), latency=LATENCY)


def a_cluster(playing: Mapping[str, Roles], obedient: bool = True) -> PaperCluster:
    scene = PaperCluster(obedient=obedient)
    return scene.settle(a_store("s1", "host-1"), *(ready(name, roles) for name, roles in playing.items()))


def order(scene: PaperCluster, worker_id: str, roles: Roles) -> None:
    state = scene.policy.state
    instance = state.instances.on_worker(worker_id)
    assert instance is not None
    order_roles(state, instance, roles, scene.now)
    scene.do(state.take_effects())


def admit(scene: PaperCluster, number: int, attempt: int = 1) -> Placement:
    scene.admit(MODEL, f"r{number}", attempt)
    placement = scene.placed(f"r{number}", attempt)
    return placement


def recalled(scene: PaperCluster) -> set[str]:
    return {answer.key.request_id for answer in scene.answers if isinstance(answer, Recall)}


def test_prompts_that_have_not_begun_leave_an_instance_that_stops_prefill() -> None:
    scene = a_cluster(TWO_PREFILLS, obedient=False)
    at: dict[str, list[int]] = {"p0": [], "p1": []}
    for number in range(8):
        at[admit(scene, number).prefill.worker_id].append(number)
    assert len(at["p0"]) == len(at["p1"]) == 4
    order(scene, "p0", DECODE)
    assert recalled(scene) == {f"r{number}" for number in at["p0"][1:]}, "the first has begun, and ends there"
    assert not any(answer.keeps_prompt for answer in scene.answers if isinstance(answer, Recall))
    for number in at["p0"][1:]:
        scene.apply(Release(AttemptKey(f"r{number}", 1), delivered=False, is_recalled=True))
        assert admit(scene, number, attempt=2).prefill.worker_id == "p1", "nothing new while the order is under way"
    assert all(admit(scene, number).decode.worker_id == "d" for number in range(20, 24)), "not before it is confirmed"
    scene.set_slot("p0", roles=DECODE)
    scene.apply(CommandEnded(RoleChange("i of p0"), CommandOutcome.ACCEPTED))
    assert {admit(scene, number).decode.worker_id for number in range(30, 34)} == {"p0"}
    told = [event.reason for event in scene.told("recall")]
    assert told[0] == "attempt 1 has not begun, and p0 gives up prefill"
    scene.check()


def test_answers_go_on_where_decode_stops() -> None:
    scene = a_cluster(TWO_DECODES, obedient=False)
    placements = [admit(scene, number) for number in range(6)]
    at_d0 = [placement.key for placement in placements if placement.decode.worker_id == "d0"]
    assert len(at_d0) == 3 and placements[0].key in at_d0
    for key in at_d0[:2]:
        scene.apply(FirstToken(key))
    order(scene, "d0", PREFILL)
    assert recalled(scene) == {at_d0[2].request_id}, (
        "the only one whose prompt has not begun, and that is to decode there"
    )
    assert {admit(scene, number).decode.worker_id for number in range(20, 26)} == {"d1"}
    scene.set_slot("d0", roles=PREFILL)
    scene.apply(CommandEnded(RoleChange("i of d0"), CommandOutcome.ACCEPTED))
    scene.pass_time(0.5)
    assert admit(scene, 30).prefill.worker_id == "d0"
    assert scene.policy.state.attempts.work_of("i of d0").queue.owes_pauses, "to the answers that go on there"
    assert scene.policy.state.attempts.work_of("i of d0").decodes.keys() >= set(at_d0[:2])
    scene.apply(Release(at_d0[0], True, Outcome(ttft_s=0.1, tbt_s=0.02, num_output_tokens=50, ended_at=scene.now)))
    scene.check()


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("calls"), st.integers(1, 12)),
            st.tuples(st.just("time"), st.sampled_from([0.05, 0.3, 2.0])),
            st.tuples(st.just("change"), st.integers(0, 3)),
            st.tuples(st.just("gateway"), st.just(0)),
        ),
        max_size=40,
    )
)
@example(  # the worker of the change has another instance by then
    [("time", 0.3), ("gateway", 0), ("calls", 13), ("time", 2.0), ("gateway", 0), ("time", 2.0), ("change", 0)]
)
@settings(max_examples=60)
def test_no_call_is_lost_by_role_changes(steps: list[tuple[str, float]]) -> None:
    """Whenever an instance changes its role while another one plays the role that it gives up."""
    scene = RunningCluster(tokens_per_s=1000.0, load_s=0.5)
    names = {"w0": PREFILL, "w1": PREFILL, "w2": DECODE, "w3": DECODE}
    scene.settle(a_store("s1", "host-1"), *(ready(name, roles) for name, roles in names.items()))
    num_calls = 0
    for kind, number in steps:
        if kind == "calls":
            for _ in range(int(number)):
                num_calls += 1
                scene.call(f"r{num_calls}", MODEL, 100 + 50 * (num_calls % 5), decode_s=0.4 * (num_calls % 4))
        elif kind == "time":
            scene.pass_time(number)
        elif kind == "gateway":
            scene.disconnect() if scene.is_gateway_here else scene.reconnect()
        elif (instance := scene.policy.state.instances.on_worker(f"w{int(number)}")) is not None:
            others = [other for other in scene.policy.state.instances if other is not instance and other.staying]
            if instance.is_settled and any(other.target_roles == instance.roles for other in others):
                order(scene, instance.worker_id, PREFILL if instance.roles == DECODE else DECODE)
        scene.hear()
        scene.check_calls()
    if not scene.is_gateway_here:
        scene.reconnect()
    scene.pass_time(30.0)
    ends = {call.end.partition(":")[0] for call in scene.calls.values()}
    assert ends <= {SERVED, "QUEUE_FULL"} and len(scene.calls) == num_calls
    assert all(call.num_recalled <= 1 for call in scene.calls.values())
    scene.check_calls()
