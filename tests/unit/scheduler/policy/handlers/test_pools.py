"""Advice: decisions that are recorded and change nothing, and targets of pools."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.scheduler.policy.paper_cluster import PaperCluster, a_model, a_store, a_worker, one_host
from torchrelay.scheduler.policy.cluster.slot_starts import SlotStarts
from torchrelay.scheduler.policy.config import PolicyConfig, PoolMode, ScalingMode
from torchrelay.scheduler.policy.effects import LoadCommand, RefusalReason, SchedulerEvent
from torchrelay.scheduler.policy.handlers.pools import pool_target
from torchrelay.scheduler.policy.inputs import LauncherReported, MinimumsSet, Withdraw
from torchrelay.scheduler.policy.types import AttemptKey, PoolTarget, Role

ADVISE = PolicyConfig(pool_mode=PoolMode.ADVISE)
FIRST, SECOND = a_model("acme/first", idle_timeout_s=1.0), a_model("acme/second")


def targets(scene: PaperCluster) -> dict[int, tuple[int, int]]:
    """By devices of a slot: the slots of the pool, and those that it should have."""
    targets = scene.policy.state.pool_targets.items()
    return {pool.num_devices: (target.num_slots, target.num_wanted) for pool, target in targets if pool.role is None}


@pytest.mark.parametrize(
    ("known", "shortages", "config", "expected"),
    [
        (PoolTarget(), {}, PolicyConfig(), "0: 0 slots needed: 0 in use"),
        (PoolTarget(4, 2), {}, PolicyConfig(), "2: 2 slots needed: 2 in use"),
        (PoolTarget(4, 2, 1), {"a": 1}, PolicyConfig(), "2: 2 slots needed: 2 in use"),
        (
            PoolTarget(1, 1),
            {"a": 1, "b": 2, "c": 1, "d": 1},
            PolicyConfig(pool_spare_slots=1),
            "7: 7 slots needed: 1 in use, 5 for a, b, c and 1 more, 1 spare",
        ),
        (
            PoolTarget(1, 1),
            {"a": 3},
            PolicyConfig(pool_max_slots=2),
            "2: 4 slots needed: 1 in use, 3 for a; the pool's maximum is 2",
        ),
        (PoolTarget(), {}, PolicyConfig(pool_min_slots=1), "1: 0 slots needed: 0 in use; the pool's minimum is 1"),
    ],
)
def test_target_and_its_reason(
    known: PoolTarget, shortages: dict[str, int], config: PolicyConfig, expected: str
) -> None:
    target = pool_target(known, tuple(shortages.items()), config)
    assert f"{target.num_wanted}: {target.reason.text}" == expected


def test_waiting_model_wants_a_slot_where_none_is_and_gives_it_up() -> None:
    scene = one_host(pool_mode=PoolMode.ADVISE)
    scene.pass_time(1.0)
    assert targets(scene) == {}
    scene.admit(FIRST, "r1")
    scene.pass_time(1.0)
    assert targets(scene) == {1: (0, 1)}
    scene.settle(a_worker("w-a"))
    scene.finish_loads()
    scene.pass_time(1.0)
    assert targets(scene) == {1: (1, 1)}
    scene.release("r1")
    scene.pass_time(5.0)
    assert targets(scene) == {1: (1, 0)}
    events = scene.told(topic="scale.pool")
    assert [(event.fields["num_slots"], event.fields["num_wanted"]) for event in events] == [(0, 1), (1, 1), (1, 0)]
    assert events[0].reason == "would have 1 slot and has 0: 1 slot needed: 0 in use, 1 for acme/first"


def test_queue_of_a_model_that_serves_raises_the_target() -> None:
    scene = one_host("w-a", pool_mode=PoolMode.ADVISE)
    scene.serve(FIRST, "r")
    for number in range(300):
        scene.admit(FIRST, f"r{number}", num_prompt_tokens=1000)
    scene.pass_time(1.0)
    assert targets(scene)[1][1] > 1


def test_minimum_of_a_pool_is_wanted_before_there_is_a_slot() -> None:
    scene = one_host(pool_mode=PoolMode.FOLLOW, pool_min_slots=1)
    scene.pass_time(1.0)
    assert targets(scene) == {1: (0, 1)}
    (event,) = scene.told(topic="scale.pool")
    assert event.reason.startswith("wants 1 slot and has 0: ")


def test_request_waits_for_the_slot_that_a_launcher_starts() -> None:
    scene = one_host(pool_mode=PoolMode.FOLLOW)
    scene.pass_time(2 * scene.config.unserved_s)  # without any worker
    scene.admit(FIRST, "r1")
    scene.admit(a_model("acme/wide", num_devices=2), "r2")
    scene.pass_time(5 * scene.config.unserved_s)
    assert scene.refusal("r1") is None
    assert scene.refusal("r2") is not None, "no launcher starts slots of two devices"
    scene.settle(a_worker("w-a"))
    scene.finish_loads()
    assert scene.placement("r1") is not None


@pytest.mark.parametrize("config", [ADVISE, PolicyConfig(pool_mode=PoolMode.FOLLOW, pool_min_slots=1)])
def test_request_is_refused_where_no_launcher_starts_a_slot(config: PolicyConfig) -> None:
    """Without a launcher, and where the pool has all the slots that it should have but its store is away."""
    scene = PaperCluster(config).settle(*([a_worker("w-a")] if config.pool_min_slots else [a_store("s", "host-1")]))
    scene.admit(FIRST, "r1")
    scene.pass_time(2 * config.unserved_s)
    assert scene.refusal("r1") is not None


def wanted(scene: PaperCluster) -> dict[Role | None, int]:
    """The slots that pools of single devices should have, of all workers and of those that play one role."""
    return {pool.role: target.num_wanted for pool, target in scene.policy.state.pool_targets.items()}


def test_request_is_refused_with_the_reason_once_the_start_of_its_slot_is_overdue() -> None:
    scene = one_host(pool_mode=PoolMode.FOLLOW, unserved_s=1.0)
    scene.admit(FIRST, "r1")
    scene.pass_time(800.0, step_s=1.0)
    assert "no worker has started for 600 s" in scene.refused("r1").message
    scene.admit(FIRST, "r2")
    scene.apply(LauncherReported("1 worker waiting: ImagePullBackOff"))
    scene.pass_time(300.0, step_s=1.0)
    assert scene.refusal("r2") is None, "a start of its own"
    scene.pass_time(800.0, step_s=1.0)
    assert scene.refusal("r2") is None, "with twice the time"
    scene.pass_time(300.0, step_s=1.0)
    refusal = scene.refused("r2")
    assert refusal.message == (
        "acme/first cannot be loaded: no worker answers, and no worker has started for 20 min: "
        "1 worker waiting: ImagePullBackOff"
    )
    assert refusal.reason is RefusalReason.LOAD_FAILED


def test_starts_may_take_as_long_as_the_longest_seen() -> None:
    starts = SlotStarts()
    starts.observe(0, True, 0.0)
    starts.observe(0, True, 900.0)
    assert starts.is_overdue(900.0)
    starts.observe(1, True, 1000.0)
    assert not starts.is_overdue(1900.0)
    starts.observe(1, True, 2001.0)
    assert starts.is_overdue(2001.0)
    starts.observe(1, False, 2002.0)
    assert not starts.is_overdue(9000.0)


def test_first_request_changes_the_target_at_once() -> None:
    scene = one_host(pool_mode=PoolMode.FOLLOW)
    scene.pass_time(2.0)
    assert scene.policy.state.pool_targets == {}
    scene.admit(FIRST, "r1")
    assert targets(scene) == {1: (0, 1)}
    evaluated_at = scene.policy.state.pools_evaluated_at
    scene.admit(SECOND, "r2")
    assert scene.policy.state.pools_evaluated_at == evaluated_at, "a launcher starts a slot already"
    scene.pass_time(1.0)
    assert targets(scene) == {1: (0, 2)}


def test_workers_of_a_single_role_have_targets_of_their_own() -> None:
    scene = one_host(pool_mode=PoolMode.FOLLOW)
    scene.pass_time(2.0)
    scene.admit(FIRST, "r1")
    assert wanted(scene) == {None: 1, Role.PREFILL: 1, Role.DECODE: 1}
    scene.settle(a_worker("w-p", playable_roles=frozenset((Role.PREFILL,))))
    scene.finish_loads()
    scene.pass_time(2 * scene.config.unserved_s)
    assert scene.refusal("r1") is None, "it waits for the slot that plays decode"
    assert wanted(scene) == {None: 1, Role.PREFILL: 1, Role.DECODE: 1}
    scene.settle(a_worker("w-d", playable_roles=frozenset((Role.DECODE,))))
    scene.finish_loads()
    assert scene.placement("r1") is not None
    scene.pass_time(1.0)
    assert wanted(scene) == {None: 2, Role.PREFILL: 1, Role.DECODE: 1}
    scene.release("r1")
    scene.pass_time(5.0)
    assert wanted(scene) == {None: 0, Role.PREFILL: 0, Role.DECODE: 0}


def test_advice_changes_no_decision() -> None:
    def kinds(config: PolicyConfig) -> tuple[list[str], int]:
        scene = PaperCluster(config).settle(a_store("store-1", "host-1"), a_worker("w-a"))
        scene.serve(FIRST, "r1")
        scene.admit(SECOND, "r2")
        scene.pass_time(3.0)
        scene.release("r1")
        scene.pass_time(20.0)
        kinds = [event.kind for event in scene.events]
        return [kind for kind in kinds if kind != "pool"], kinds.count("pool")

    (advised, num_advised), (plain, num_plain) = kinds(ADVISE), kinds(PolicyConfig())
    assert advised == plain and num_advised > 0 and num_plain == 0


@pytest.mark.parametrize(
    ("asked", "offered"),
    [
        ({"engine": "vllm"}, {"engine": "vllm"}),
        ({"hosts": frozenset(("zone=a",))}, {"labels": frozenset(("zone=a", "gpu=l4"))}),
    ],
)
def test_model_whose_engine_or_labels_the_pool_lacks_wants_no_slot_of_it(
    asked: dict[str, Any], offered: dict[str, Any]
) -> None:
    """A launcher started slots of its own engine for it, which could not serve it, and never enough."""
    scene = PaperCluster(PolicyConfig(pool_mode=PoolMode.FOLLOW)).settle(a_worker("w-a"))  # its store is away
    other = a_model("acme/other", **asked)
    scene.pass_time(2.0)
    scene.admit(other, "r1")
    assert targets(scene) == {1: (1, 0)}
    scene.admit(FIRST, "r2")
    assert targets(scene) == {1: (1, 1)}
    scene.apply(Withdraw(AttemptKey("r1", 1)))
    scene.apply(MinimumsSet((replace(other, min_instances=3),)))
    scene.pass_time(2.0)
    assert targets(scene) == {1: (1, 1)}
    scene.settle(a_worker("w-b", **offered))
    scene.pass_time(2.0)
    assert targets(scene) == {1: (2, 4)}, "a slot of the pool suits it now"


MODEL = a_model()
OTHER = a_model("acme/other", version_id="v-other", pack_id="p-other")


def a_cluster() -> PaperCluster:
    return one_host("w1", "w2", scaling=ScalingMode.ADVISE, idle_timeout_s=5.0)


def advice(scene: PaperCluster) -> list[SchedulerEvent]:
    return scene.told(topic="scale.advice")


def test_request_for_model_at_zero_is_refused_and_its_load_is_advised() -> None:
    scene = a_cluster()
    scene.admit(MODEL, "r1")
    scene.pass_time(12.0)
    assert not [command for command in scene.commands if isinstance(command, LoadCommand)]
    refusal = scene.refused("r1")
    assert refusal.reason is RefusalReason.LOAD_FAILED
    assert "the scheduler only advises" in refusal.message
    (advised,) = advice(scene)
    assert (advised.model, advised.reason) == (MODEL.name, "would load 1 instance: at zero, 1 waiting")
    assert advised.fields["cause"] == "at_zero" and advised.fields["num_waiting"] == 1
    assert not scene.policy.state.instances.of_version(MODEL.version_id)


def test_minimum_is_loaded_and_drain_is_advised_once_a_minute() -> None:
    scene = a_cluster()
    scene.models[MODEL.version_id] = kept = replace(MODEL, min_instances=1)
    for minimums in ((kept,), ()):
        scene.apply(MinimumsSet(minimums))
        scene.finish_loads()
        scene.pass_time_with_beats(20.0)
    (instance,) = scene.policy.state.instances.of_version(MODEL.version_id)
    assert not scene.unloads()
    (advised,) = advice(scene)
    assert advised.subject == instance.instance_id and advised.reason.startswith("would drain: idle for")
    scene.pass_time_with_beats(50.0)
    first, second = advice(scene)
    assert second.at - first.at >= 60.0, "it still stands"
    scene.admit(MODEL, "r1")
    assert scene.placement("r1") is not None, "what is loaded serves"
