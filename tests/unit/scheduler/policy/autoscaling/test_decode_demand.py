"""Prefill and decode sized apart: each role gets and gives back instances by its own work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.scheduler.policy.autoscaling.test_decision import (
    DECODE,
    PREFILL,
    RULES,
    a_demand,
    a_situation,
    an_instance,
    crowded_demand,
)
from tests.unit.scheduler.policy.paper_cluster import PaperCluster, a_model, a_store, a_worker
from torchrelay.common.latency.latency_model import LatencyModel, StepCost
from torchrelay.scheduler.policy.autoscaling.autoscaler_input import Action, Demand, Drain, InstanceLoad, Load
from torchrelay.scheduler.policy.autoscaling.decision import decide
from torchrelay.scheduler.policy.autoscaling.decode_demand import DecodeDemand, most_in_time
from torchrelay.scheduler.policy.config import PolicyConfig, PoolMode
from torchrelay.scheduler.policy.handlers import cluster_load
from torchrelay.scheduler.policy.inputs import FirstToken, Release
from torchrelay.scheduler.policy.prediction import Outcome
from torchrelay.scheduler.policy.types import AttemptKey, LatencyTargets, Role, Roles

MODEL = a_model()
STORE = a_store("s1", "host-1")


def answers(num_answers: int, arrivals_per_s: float, **changes: object) -> DecodeDemand:
    """An instance holds 10 answers of 10 s each: one of them is one second of its work."""
    demand = DecodeDemand(
        num_answers,
        num_held=10,
        num_most=20,
        answer_s=10.0,
        arrivals_per_s=arrivals_per_s,
        target_s=2.0,
        price_s=60.0,
        late_s=60.0,
    )
    return replace(demand, **changes)  # type: ignore[arg-type]


def decided(demand: Demand, playing: dict[str, Roles], num_free: int = 2, num_open: int = 3) -> list[Action]:
    workers = [a_worker(name) for name in playing] + [a_worker(f"free-{number}") for number in range(num_free)]
    loads = [
        InstanceLoad(an_instance(MODEL, worker, playing[worker.worker_id]), num_open, 0, last_active=100.0)
        for worker in workers[: len(playing)]
    ]
    return list(decide(a_situation([demand], loads, workers, [STORE]), RULES))


def roles_woken(actions: list[Action]) -> list[Roles]:
    return [assignment.roles for action in actions if isinstance(action, Load) for assignment in action.assignments]


def test_held_answers_need_no_more_instances() -> None:
    assert answers(10, 1.0).num_saved(1, 5.0) == 0
    assert answers(5, 0.5).num_saved(1, 0.0) == 0
    # The queue of answers grows by half a second of work per second from nothing: after 4 s a target is exceeded.
    assert answers(10, 1.5).num_saved(1, 0.0) == pytest.approx(((0.5 * 60 - 2) ** 2 / (2 * 0.5)) / 2)
    assert answers(10, 1.5).num_saved(2, 0.0) == 0
    assert answers(30, 1.0).num_saved(1, 0.0) > answers(20, 1.0).num_saved(1, 0.0) > 1


def test_batch_size_is_bounded_by_token_target() -> None:
    assert most_in_time(64, 0.1, 0.02, 0.005) == 16
    assert most_in_time(8, 0.1, 0.02, 0.005) == 8, "its pool holds no more"
    assert most_in_time(8, 0.1, 0.2, 0.005) == 8, "more instances would not help"
    assert most_in_time(8, 0.1, 0.02, 0.0) == 8


def test_only_lacking_role_grows() -> None:
    pair = {"p": PREFILL, "d": DECODE}
    busy_decode = a_demand(MODEL, 0, arrivals_per_s=2.0, load=0.1, decode=answers(20, 2.0))
    actions = decided(busy_decode, pair)
    assert roles_woken(actions) == [DECODE]
    assert isinstance(actions[0], Load) and actions[0].reason.text.startswith(
        "1 prefill and 2 decode wanted (20 answers, 10 on each): the"
    )
    busy_prefill = crowded_demand(MODEL, 60, load_s={}, decode=answers(2, 0.2))
    assert roles_woken(decided(busy_prefill, pair, num_free=1)) == [PREFILL]
    busy_both = crowded_demand(MODEL, 60, load_s={}, decode=answers(20, 2.0))
    assert roles_woken(decided(busy_both, pair)) == [DECODE, PREFILL], "what saves more first"
    assert roles_woken(decided(busy_both, pair, num_free=1)) == [DECODE]


def test_only_spare_role_shrinks() -> None:
    playing = {"p0": PREFILL, "p1": PREFILL, "d0": DECODE, "d1": DECODE}

    def drained(prefill_crowded_at: float, decode_last_full_at: float) -> list[str]:
        decode = answers(8, 0.8, last_full_at=decode_last_full_at)
        demand = a_demand(MODEL, 0, last_full_at=prefill_crowded_at, arrivals_per_s=0.8, load=0.4, decode=decode)
        return [item.instance_id for item in decided(demand, playing) if isinstance(item, Drain)]

    assert drained(prefill_crowded_at=90.0, decode_last_full_at=30.0) == ["i-d0"]
    assert drained(prefill_crowded_at=30.0, decode_last_full_at=90.0) == ["i-p0"]
    assert drained(prefill_crowded_at=30.0, decode_last_full_at=30.0) == ["i-p0", "i-d0"]
    assert drained(prefill_crowded_at=90.0, decode_last_full_at=90.0) == []


def test_lateness_is_attributed_to_full_decode() -> None:
    pair = {"p": PREFILL, "d": DECODE}
    late = a_demand(MODEL, 0, arrivals_per_s=0.9, load=0.5, num_late_before=5)
    assert roles_woken(decided(replace(late, decode=answers(11, 0.9)), pair)) == [DECODE]
    assert roles_woken(decided(replace(late, decode=answers(9, 0.9)), pair)) == [PREFILL]


def apart(num_decode: int = 1) -> PaperCluster:
    """A prefill worker, decode workers whose pools hold three answers each, and a free one of each kind."""
    latency = LatencyModel(
        prefill=StepCost(per_position_s=1e-5, num_steps=100),
        decode=StepCost(base_s=0.05, per_position_s=0.001, num_steps=100),
        token_budget=2048,
    )
    pool = 3 * 160 * MODEL.kv_bytes_per_token
    decodes = [
        a_worker(f"d{number}", "host-1", DECODE, kv_pool_bytes=pool, latency=latency)
        for number in range(num_decode + 1)
    ]
    prefills = [a_worker(f"p{number}", "host-1", PREFILL, latency=latency) for number in range(2)]
    return PaperCluster().settle(a_store("store-1", "host-1"), *prefills, *decodes)


def learn_length(scene: PaperCluster, num_tokens: int) -> None:
    """Ends eight answers of that length."""
    for number in range(8):
        scene.admit(MODEL, f"first-{number}")
        scene.finish_loads()
        scene.apply(FirstToken(AttemptKey(f"first-{number}", 1)))
        scene.pass_time(0.5)
        outcome = Outcome(ttft_s=0.01, tbt_s=0.02, num_output_tokens=num_tokens, ended_at=scene.now)
        scene.apply(Release(AttemptKey(f"first-{number}", 1), True, outcome))


def with_slow_tokens(num_workers: int, config: PolicyConfig) -> PaperCluster:
    """An instance with thirty long answers at once and no queue, on the first of the workers."""
    latency = LatencyModel(
        prefill=StepCost(per_position_s=1e-5, num_steps=100),
        decode=StepCost(base_s=0.02, per_position_s=0.01, num_steps=100),
        token_budget=2048,
    )
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
    (target,) = with_slow_tokens(1, PolicyConfig(pool_mode=PoolMode.ADVISE)).policy.state.pool_targets.values()
    assert target.load.num_slots == 1 and target.num_wanted == PolicyConfig().max_instances, target.reason


def test_placed_answers_add_no_instance_that_would_get_none() -> None:
    """Answers stay on their instances, so an instance for thirty of them served nothing."""
    demand = answers(30, 0.0)
    assert demand.num_saved(1, 0.0) > 1 and demand.without_excess(1).num_saved(1, 0.0) == 0
    waiting = answers(30, 0.0, num_waiting=20)
    assert waiting.without_excess(1).num_answers == 30, "all but ten wait"


def test_full_pools_get_decode_instance_only() -> None:
    scene = apart()
    learn_length(scene, 50)
    for number in range(12):
        scene.admit(MODEL, f"r-{number}")
        if scene.placement(f"r-{number}"):
            scene.apply(FirstToken(AttemptKey(f"r-{number}", 1)))
    demand = next(demand for demand in cluster_load.autoscaler_input(scene.policy.state, scene.now).demands)
    assert demand.decode is not None and (demand.decode.num_answers, demand.decode.num_held) == (12, 3)
    # Nine prompts of 1 ms wait; the instance that is being loaded has places for three of them.
    assert demand.backlog_s == pytest.approx(0.003), "what waits for a place to decode is not a queue of prompts"
    scene.pass_time(20.0)
    scene.finish_loads()
    scene.pass_time(1.0)
    playing = [role for instance in scene.policy.state.instances for role in instance.target_roles]
    assert sorted(playing) == [Role.PREFILL, Role.DECODE, Role.DECODE]
    scene.check()

    scene.policy.state.note_model(replace(MODEL, targets=LatencyTargets(tbt_target_s=0.0415)), scene.now)
    demand = next(demand for demand in cluster_load.autoscaler_input(scene.policy.state, scene.now).demands)
    assert demand.decode is not None and demand.decode.num_held == 2, "the tokens of three are 42 ms apart"
