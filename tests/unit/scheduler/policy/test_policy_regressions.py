"""Faults that the policy once had, each as it showed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.scheduler.policy.paper_cluster import (
    MB,
    PaperCluster,
    a_copy,
    a_model,
    a_store,
    a_worker,
    an_admission,
    hosts,
    two_workers_one_host,
)
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.effects import RefusalReason, SetRolesCommand, UnloadCommand
from torchrelay.scheduler.policy.inputs import (
    Admit,
    FirstToken,
    LoadUnanswered,
    MinimumsSet,
    RolesFailed,
    RolesSet,
    WorkerReported,
)
from torchrelay.scheduler.policy.types import BOTH, AttemptKey, InstancePhase, Role, SlotStatus

MODEL = a_model(idle_timeout_s=5.0)


def unloaded(scene: PaperCluster) -> list[str]:
    return [command.worker_id for command in scene.commands if isinstance(command, UnloadCommand)]


def test_load_longer_than_idle_timeout_is_not_idle() -> None:
    """P3: the idle clock began when the instance was created."""
    scene = two_workers_one_host()
    admission = scene.admit(MODEL, "r1")
    scene.pass_time(12.0)
    assert unloaded(scene) == []
    scene.finish_loads()
    scene.apply(FirstToken(admission.key))
    scene.release("r1")
    scene.pass_time(4.0)
    assert unloaded(scene) == []
    scene.pass_time(2.0)
    assert len(unloaded(scene)) == 2


def test_request_too_large_for_instances_lets_others_pass() -> None:
    """P8: it blocked its line for ever, as another pool, of a worker that was away, could have held it."""
    scene = PaperCluster().settle(
        a_store("s1", "host-1"), a_worker("small", kv_pool_bytes=MB), a_worker("large", kv_pool_bytes=64 * MB)
    )
    scene.kill("large")
    scene.admit(MODEL, "large", num_prompt_tokens=2000, max_tokens=100)
    scene.serve(MODEL, "small", num_prompt_tokens=100, max_tokens=10)
    scene.pass_time(0.5)
    assert scene.placement("large") is None and scene.refusal("large") is None
    assert scene.placement("small") is not None


def test_request_too_large_for_remaining_slots_is_refused() -> None:
    """B6: the largest pool ever seen counted for ever, and its wait asked for one more instance after the other."""
    scene = PaperCluster().settle(
        a_store("s1", "host-1"),
        a_store("s2", "host-2"),
        a_worker("large", kv_pool_bytes=64 * MB),
        *(a_worker(f"small {number}", "host-2", kv_pool_bytes=MB) for number in range(6)),
    )
    scene.kill("large")
    scene.admit(MODEL, "large", num_prompt_tokens=2000, max_tokens=100)
    scene.admit(MODEL, "resumed", attempt=2, num_forced_tokens=1, num_prompt_tokens=2000, max_tokens=100)
    scene.serve(MODEL, "small", num_prompt_tokens=100, max_tokens=10)
    scene.pass_time(9.0)
    assert scene.placement("small") is not None
    assert len(list(scene.policy.state.instances)) == 1, "none of these slots would help the large one"
    assert scene.refusal("large") is None, "its worker may come back"
    scene.pass_time(2.0)
    refusal = scene.refused("large")
    assert refusal.reason is RefusalReason.NO_CAPACITY and "KV" in refusal.message
    assert scene.refusal("resumed", attempt=2) is None, "somebody has read its first tokens"
    scene.pass_time(50.0, step_s=0.5)
    assert scene.refusal("resumed", attempt=2) is not None


def test_request_goes_to_slot_with_large_enough_pool() -> None:
    """P8: a slot was chosen without a look at its pool."""
    scene = PaperCluster().settle(
        a_store("s1", "host-1"), a_worker("a small", kv_pool_bytes=MB), a_worker("b large", kv_pool_bytes=64 * MB)
    )
    scene.serve(MODEL, "small", num_prompt_tokens=100, max_tokens=10)
    assert scene.placement("small") is not None
    scene.admit(MODEL, "large", num_prompt_tokens=2000, max_tokens=100)
    scene.pass_time(1.0)
    placement = scene.placed("large")
    assert placement.decode.worker_id == "b large"


def test_unanswered_accepted_load_is_no_failure() -> None:
    """P12: its retry met the load itself as a conflict, and three such refused the model's requests."""
    scene = PaperCluster(obedient=False).settle(a_store("s1", "host-1"), a_worker("w"))
    scene.admit(MODEL, "r1")
    order = scene.loads()[0].hops[0].loads[0]
    scene.apply(LoadUnanswered(order.instance_id))
    slot = SlotStatus(InstancePhase.LOADING, order.instance_id, MODEL.name, MODEL.version_id, MODEL.pack_id, BOTH, 1, 4)
    scene.workers["w"] = replace(scene.workers["w"], slot=slot)
    scene.pass_time(1.0)
    assert len(scene.loads()) == 1 and "load_failed" not in scene.kinds()
    placement = scene.placed("r1")
    assert placement.prefill.instance_id == order.instance_id


def test_refused_role_change_is_no_failed_load_and_backs_off() -> None:
    """P13: three of them refused the model's requests as LOAD_FAILED."""
    scene = PaperCluster(obedient=False).settle(a_store("s1", "host-1"), a_worker("w"))
    prefill = frozenset((Role.PREFILL,))
    scene.admit(MODEL, "r1")
    (wake,) = scene.loads()
    order = wake.hops[0].loads[0]
    scene.load(order.instance_id, "w", prefill, MODEL)
    scene.set_slot("w", phase=InstancePhase.READY, roles=prefill, num_layers_ready=4)
    scene.report("w")
    scene.admit(MODEL, "r2")
    num_seen = 0
    for _ in range(50):
        scene.pass_time(0.1)
        num_seen, commands = len(scene.commands), scene.commands[num_seen:]
        for command in commands:
            if isinstance(command, SetRolesCommand):
                scene.apply(RolesFailed(command.instance_id, "it does not answer"))
    asked = [command for command in scene.commands if isinstance(command, SetRolesCommand)]
    assert 2 <= len(asked) <= 7, "about once a second"
    refusal = scene.refusal("r2")
    assert refusal is None or refusal.reason is not RefusalReason.LOAD_FAILED


def test_earlier_report_does_not_undo_roles() -> None:
    """P15: until its stream said so too, each of the broker's reports was given the slot with the old roles, and the
    roles were ordered anew.
    """
    scene = PaperCluster(obedient=False).settle(a_store("s1", "host-1"), a_worker("w"))
    prefill = frozenset((Role.PREFILL,))
    scene.admit(MODEL, "r1")
    order = scene.loads()[0].hops[0].loads[0]
    scene.load(order.instance_id, "w", prefill, MODEL)
    scene.set_slot("w", phase=InstancePhase.READY, roles=prefill, num_layers_ready=4)
    scene.report("w")
    scene.admit(MODEL, "r2")
    scene.pass_time(0.1)
    scene.apply(RolesSet(order.instance_id))
    scene.apply(WorkerReported(replace(scene.workers["w"], seen_at=scene.now), streamed=False))
    instance = scene.policy.state.instances.get(order.instance_id)
    assert instance is not None and instance.roles == BOTH
    assert len([command for command in scene.commands if isinstance(command, SetRolesCommand)]) == 1


def test_worker_with_orphaned_requests_frees_its_slot() -> None:
    """P14: it kept its slot for ever."""
    scene = two_workers_one_host()
    admission = scene.admit(MODEL, "r1")
    scene.finish_loads()
    scene.apply(FirstToken(admission.key))
    scene.release("r1")
    for worker_id, worker in scene.workers.items():
        scene.workers[worker_id] = replace(worker, num_running=1)
    scene.pass_time(10.0)
    assert unloaded(scene) == [], "its report may be right for a while"
    scene.pass_time(scene.config.drain_s)
    assert len(unloaded(scene)) == 2


def test_overrun_drain_is_ordered_again_without_grace() -> None:
    """P4: it was told once, and waited for without end."""
    scene = PaperCluster().settle(a_store("s1", "host-1"), a_worker("w"))
    scene.serve(MODEL, "r1")
    scene.obedient = False
    scene.release("r1")
    scene.pass_time(5.6)
    assert [command.drain_s for command in scene.commands if isinstance(command, UnloadCommand)] == [30.0]
    scene.pass_time(scene.config.longest_drain_s - 1.0, step_s=0.5)
    assert len(unloaded(scene)) == 1
    scene.pass_time(2.0)
    assert [command.drain_s for command in scene.commands if isinstance(command, UnloadCommand)] == [30.0, 0.0]
    scene.pass_time(scene.config.longest_drain_s + 1.0, step_s=0.5)
    assert len(unloaded(scene)) == 3


def test_uncomputed_prompt_is_not_cached() -> None:
    """P16: prefixes were noted when a prompt was placed, and kept when its attempt failed."""
    scene = hosts(1)
    model = a_model(routing_block_tokens=64)
    for worker_id, worker in scene.workers.items():
        scene.workers[worker_id] = replace(worker, has_prefix_cache=True)
    scene.report_all()
    placement = scene.serve(model, "r1", num_prompt_tokens=200, block_hashes=(b"1", b"2"))
    scene.release("r1", delivered=False)
    assert scene.policy.state.prefix_index.num_blocks(placement.prefill.instance_id, (b"1", b"2")) == 0


@pytest.mark.parametrize("num_layers_ready", [1, 3])
def test_load_left_follows_layers(num_layers_ready: int) -> None:
    """P1: the scheduler's side; that workers report each layer is tested with them."""
    scene = two_workers_one_host()
    scene.stores["store-1"] = a_store("store-1", "host-1", [a_copy(MODEL)])
    scene.report_all()
    scene.admit(MODEL, "r1")
    scene.pass_time(3.0)
    for worker_id in scene.workers:
        scene.set_slot(worker_id, num_layers_ready=num_layers_ready)
    scene.report_all()
    second = scene.admit(MODEL, "r2")
    scene.finish_loads()
    placed = scene.placed(second.key.request_id)
    left_s = 3.0 * (4 - num_layers_ready) / num_layers_ready
    assert placed.predicted.ttft_s > left_s


def test_client_of_cold_model_is_told_to_return_after_its_usual_load() -> None:
    """Q22: the time to come back assumed the configured rate, whatever loads had taken."""
    scene = PaperCluster(PolicyConfig(queue_limit=1)).settle(a_store("s1", "host-1"), a_worker("w"))
    scene.admit(MODEL, "first")
    scene.pass_time(20.0)
    scene.finish_loads()  # from the remote store
    cold = a_model("acme/cold")
    scene.admit(cold, "waits")
    scene.admit(cold, "is refused")
    refused = scene.refused("is refused")
    assert refused.retry_after_s >= 20.0


def test_forecast_begins_a_load_from_remote_in_time() -> None:
    """Q21: the load began as late as one from another host, and came many seconds late."""
    model, took_s, every_s = a_model(idle_timeout_s=30.0), 20.0, 120.0
    scene = PaperCluster().settle(a_store("s1", "host-1"), a_worker("w"))
    for number in range(14):
        scene.admit(model, f"r{number}")
        asked_at = scene.now
        scene.pass_time(took_s)
        scene.finish_loads()  # from the remote store
        scene.release(f"r{number}")
        scene.pass_time(every_s - took_s, step_s=0.5)
    (expected,) = scene.policy.state.instances
    assert expected.created_at <= asked_at + every_s - took_s


def test_large_requests_of_shared_model_are_placed_once_the_large_instance_is_free() -> None:
    """They waited for a change of the instances: the large one takes few prompts beside another tenant's, and the other
    is too small for them.
    """
    kept = replace(a_model(), min_instances=2)
    scene = PaperCluster().settle(
        a_store("s1", "host-1"),
        a_worker("large", "host-1", kv_pool_bytes=1024 * MB),
        a_worker("small", "host-1", kv_pool_bytes=4 * MB),
    )
    scene.models[kept.version_id] = kept
    scene.apply(MinimumsSet((kept,)))
    scene.finish_loads()
    scene.pass_time(1.0)
    names = [f"r{number}" for number in range(12)]
    for number, name in enumerate(names):
        named = replace(kept, name=("acme/tiny", "birch/tiny")[number % 2])
        scene.apply(Admit(an_admission(named, name, now=scene.now, max_tokens=10000), named))
    placed = {name for name in names if scene.placement(name)}
    assert placed and placed != set(names)
    for name in placed:
        scene.apply(FirstToken(AttemptKey(name, 1)))
        scene.release(name)
    scene.pass_time(1.0)
    assert len({name for name in names if scene.placement(name)}) > len(placed)
