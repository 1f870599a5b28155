"""The policy when workers die or fall silent and loads fail; and faults that it once had, each as it showed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.scheduler.policy.paper_cluster import (
    MB,
    NUM_CHUNKS,
    PREFILL,
    PaperCluster,
    a_model,
    a_slot,
    a_store,
    a_worker,
    an_admission,
    hosts,
    one_host,
    two_workers_one_host,
)
from torchrelay.common.liveness import EngineProgress
from torchrelay.scheduler.policy.autoscaling.load_failures import AvoidedWorkers
from torchrelay.scheduler.policy.effects import DisconnectCommand, RefusalReason, SetRolesCommand, UnloadCommand
from torchrelay.scheduler.policy.inputs import (
    Admit,
    CommandEnded,
    CommandOutcome,
    FirstToken,
    Load,
    MinimumsSet,
    PeerGone,
    RoleChange,
    Tick,
    WorkerReported,
)
from torchrelay.scheduler.policy.types import BOTH, AttemptKey, InstancePhase, Peer, Role, SlotStatus

MODEL = a_model()


@pytest.mark.parametrize("lost_role", Role)
def test_lost_role_goes_to_instance_of_other_role(lost_role: Role) -> None:
    scene = two_workers_one_host()
    placement = scene.serve(MODEL, "r1")
    lost, left = placement.prefill, placement.decode
    if lost_role is Role.DECODE:
        lost, left = left, lost
    scene.kill(lost.worker_id)
    scene.admit(MODEL, "r1", attempt=2, num_forced_tokens=7, lost_workers=(lost.worker_id,))
    resumed = scene.placed("r1", attempt=2)
    assert resumed.decode.instance_id == resumed.prefill.instance_id == left.instance_id and not resumed.cold
    roles = [command.instance_id for command in scene.commands if isinstance(command, SetRolesCommand)]
    assert roles == [left.instance_id]
    # The worker's successor is a free slot again; nothing is moved back.
    commands = len(scene.commands)
    scene.settle(a_worker(lost.worker_id, incarnation="second"))
    assert len(scene.commands) == commands


def test_stopped_worker_and_its_late_reports_are_ignored() -> None:
    scene = two_workers_one_host()
    scene.serve(a_model(), "r1")
    scene.apply(PeerGone(Peer("w-a"), is_stopped=True))
    scene.report("w-a")  # was on its way
    assert [instance.worker_id for instance in scene.policy.state.instances] == ["w-b"]
    (stopped,) = scene.told(topic="instance.stopped")
    assert (stopped.fields["cause"], stopped.fields["worker_id"]) == ("worker_stopped", "w-a")
    assert not scene.told(topic="instance.lost")


def test_failed_worker_returns_without_broker() -> None:
    """B5: only a whole report ended the suspicion, and a worker whose slot does not change sends none on its stream."""
    scene = two_workers_one_host()
    scene.serve(a_model(), "r1")
    scene.pass_time(1.0)
    scene.admit(a_model(), "r2", lost_workers=tuple(scene.workers))
    assert scene.placement("r2") is None
    scene.pass_time_with_beats(1.0)
    assert scene.placement("r2") is not None


def test_hung_worker_is_lost_and_disconnected_without_broker() -> None:
    scene = one_host("w-a")
    scene.serve(a_model(), "r1")
    del scene.workers["w-a"]  # the only one
    scene.pass_time_with_beats(4.0)
    (lost,) = scene.told(topic="instance.lost")
    assert lost.fields["cause"] == "worker_silent"
    assert DisconnectCommand("w-a:1") in scene.commands


def test_stalled_worker_is_lost_and_requests_go_elsewhere() -> None:
    scene = two_workers_one_host()
    placement = scene.serve(MODEL, "r1")
    hung, other = placement.decode.worker_id, placement.prefill.worker_id
    scene.workers[hung] = replace(scene.workers[hung], progress=EngineProgress(40, True, expected_s=0.05))
    scene.pass_time(3.5)
    (lost,) = scene.told(topic="instance.lost")
    assert (lost.fields["cause"], lost.fields["worker_id"]) == ("worker_stalled", hung)
    scene.admit(MODEL, "r1", attempt=2, num_forced_tokens=7, lost_workers=(hung,))
    scene.pass_time(60.0)  # however often it reports, nothing is placed there
    resumed = scene.placed("r1", attempt=2)
    assert resumed.decode.worker_id == resumed.prefill.worker_id == other
    scene.workers[hung] = replace(scene.workers[hung], progress=EngineProgress(41, True))
    scene.pass_time(0.5)
    assert hung in scene.policy.state.membership.workers


def test_request_waits_for_return_of_failed_store() -> None:
    scene = two_workers_one_host()
    scene.obedient = False
    scene.admit(MODEL, "r1")
    for attempt in range(2, 5):
        for instance in list(scene.policy.state.instances):
            scene.apply(
                CommandEnded(Load(instance.instance_id, "store-1"), CommandOutcome.REFUSED, "connection refused")
            )
        scene.admit(MODEL, "r1", attempt=attempt)
        scene.pass_time(1.0)
    assert scene.policy.state.versions.of(MODEL.version_id).failures.given_up_for(scene.now), "the last try has failed"
    assert all(scene.refusal("r1", attempt=attempt) is None for attempt in range(1, 5))
    scene.obedient = True
    scene.pass_time(10.0)
    assert scene.placement("r1", attempt=4) is not None


def test_request_waits_for_return_of_lost_store() -> None:
    """A worker reports that its loads fail as the store cannot be reached; that is no fault of the model or worker."""
    scene = two_workers_one_host()
    scene.admit(MODEL, "r1")
    version = scene.policy.state.versions.of(MODEL.version_id)
    for attempt in range(2, 20):
        for worker_id, worker in scene.workers.items():
            if worker.slot.instance_id:
                scene.workers[worker_id] = replace(worker, slot=SlotStatus(error="no peer", store_was_lost=True))
        scene.pass_time(0.1)
        scene.admit(MODEL, "r1", attempt=attempt)
        scene.pass_time(0.1)
        assert scene.refusal("r1", attempt=attempt) is None
        if version.failures.given_up_for(scene.now):
            break
    assert version.failures.given_up_for(scene.now) == "no peer"
    assert {event.fields["cause"] for event in scene.told(topic="instance.failed")} == {"store_lost"}
    scene.pass_time(10.0)
    assert scene.placement("r1", attempt=attempt) is not None


def test_load_moves_to_another_host_from_lost_store() -> None:
    """All workers of the host are avoided, also those that have not failed, and for a fixed time only."""
    scene, model = hosts(2), a_model()
    scene.admit(model, "r1")
    first = next(iter(scene.policy.state.instances)).worker_id
    host_id = scene.workers[first].host_id
    on_host = {worker_id for worker_id, worker in scene.workers.items() if worker.host_id == host_id}
    avoided = scene.policy.state.avoided_workers
    for failing in ({first}, on_host):
        for worker_id in failing:
            lost = SlotStatus(error=f"no peer of {worker_id}", store_was_lost=True)
            scene.workers[worker_id] = replace(scene.workers[worker_id], slot=lost)
        scene.pass_time(0.1)
        assert avoided.at(scene.now) == on_host
    scene.admit(model, "r1", attempt=2)
    scene.pass_time(1.0)
    assert scene.placement("r1", attempt=2) is not None
    assert {instance.worker_id for instance in scene.policy.state.instances}.isdisjoint(on_host)
    scene.pass_time(5.0)
    assert not avoided.at(scene.now)


@pytest.mark.parametrize("num_layers", [0, 1])
def test_refused_relay_ends_accepted_load_without_layers_and_blames_store(num_layers: int) -> None:
    scene = two_workers_one_host()
    scene.admit(MODEL, "r1")
    assert scene.placement("r1") is not None  # on the loading instances
    for worker_id in scene.workers:
        scene.set_slot(worker_id, num_layers_ready=num_layers)
        scene.report(worker_id)
    loading = list(scene.policy.state.instances)
    for instance in loading:
        scene.apply(CommandEnded(Load(instance.instance_id, "store-1"), CommandOutcome.REFUSED, "too many relays"))
    unloads = scene.unloads()
    if num_layers:
        assert not unloads
        return
    assert {command.instance_id for command in unloads} == {instance.instance_id for instance in loading}
    assert not any(command.drain_s for command in unloads)
    draining = scene.told(topic="instance.draining")
    assert {event.fields["cause"] for event in draining} == {"load_refused"}
    state = scene.policy.state
    assert state.versions.of(MODEL.version_id).failures.is_of_store and not state.avoided_workers.at(scene.now)


@pytest.mark.parametrize(
    ("num_verified", "num_layers", "limit_s", "why"),
    [
        (3, 0, 15.0, "nothing of its pack arrived for 15 s"),
        (NUM_CHUNKS, 2, 15.0, "its host has the pack, and no layer of it was loaded for 15 s"),
        (0, 1, 5.0, "the param-store of host host-1 does not answer"),
    ],
    ids=["no bytes", "B7: no deadline once the host had all of the pack", "its store is gone"],
)
def test_load_is_given_up_a_while_after_its_last_progress(
    num_verified: int, num_layers: int, limit_s: float, why: str
) -> None:
    scene = two_workers_one_host(load_tries=1, load_stall_s=15.0)
    scene.admit(MODEL, "r1")
    scene.hold("store-1", MODEL, num_chunks_verified=2)
    scene.pass_time(limit_s - 1.0, step_s=0.5)
    if num_verified:
        scene.hold("store-1", MODEL, num_chunks_verified=num_verified)
    else:
        scene.stores.clear()
        scene.apply(PeerGone(Peer("store-1", is_store=True)))
    for worker_id in scene.workers:
        scene.set_slot(worker_id, num_layers_ready=num_layers)
    scene.pass_time(limit_s - 1.0, step_s=0.5)
    assert not scene.unloads(), "that was progress"
    scene.pass_time(2.0)
    assert len(scene.unloads()) == 2
    assert {event.reason for event in scene.told(topic="instance.draining")} == {why}


def test_request_without_workers_is_refused_resumed_one_later() -> None:
    scene = one_host()
    scene.workers.clear()
    scene.pass_time(3.5)
    scene.admit(MODEL, "new")
    scene.admit(MODEL, "resumed", attempt=2, num_forced_tokens=5)
    scene.pass_time(10.0)
    refusal = scene.refused("new")
    assert refusal.message == "acme/tiny cannot be loaded: no worker answers"
    assert scene.refusal("resumed", attempt=2) is None
    scene.settle(a_worker("w-a"))
    scene.pass_time(0.5)
    assert scene.placement("resumed", attempt=2) is not None


def test_silence_before_listening_keeps_workers() -> None:
    scene = two_workers_one_host()
    scene.now += 10
    scene.apply(Tick(listening_since=scene.now))
    assert len(scene.policy.state.membership.workers) == 2


def test_failed_load_is_retried_elsewhere() -> None:
    """A worker is avoided after a failed load, and for longer after each further one."""
    scene = hosts(2)
    scene.failing_workers = {"p-1", "d-1"}
    scene.admit(MODEL, "r1")
    scene.pass_time(1.0)
    assert scene.placed("r1").prefill.worker_id in ("p-2", "d-2")
    avoided, times = AvoidedWorkers(scene.config), []
    for _ in range(3):
        avoided.load_failed("w", 0.0)
        times.append(next(now for now in range(1000) if not avoided.at(now)))
    assert times[1] == 2 * times[0] and times[2] == 4 * times[0]


def test_waiting_requests_learn_cause_after_last_try() -> None:
    scene = two_workers_one_host()
    scene.failing_workers = {"w-a", "w-b"}
    scene.admit(MODEL, "r1")
    scene.pass_time(2.0)
    refusal = scene.refused("r1")
    assert refusal.reason is RefusalReason.LOAD_FAILED and "is broken" in refusal.message
    wakes = len(scene.loads())
    assert wakes == scene.config.load_tries
    scene.failing_workers.clear()
    scene.admit(MODEL, "r2")
    assert len(scene.loads()) == wakes  # after the longest back-off only
    scene.pass_time(scene.config.load_backoff_max_s + 0.2)
    assert scene.placement("r2") is not None


SHORT = a_model(idle_timeout_s=5.0)


def unloaded(scene: PaperCluster) -> list[str]:
    return [command.worker_id for command in scene.commands if isinstance(command, UnloadCommand)]


def test_load_longer_than_idle_timeout_is_not_idle() -> None:
    """P3: the idle clock began when the instance was created."""
    scene = two_workers_one_host()
    admission = scene.admit(SHORT, "r1")
    scene.pass_time(12.0)
    assert unloaded(scene) == []
    scene.finish_loads()
    scene.apply(FirstToken(admission.key))
    scene.release("r1")
    scene.pass_time(4.0)
    assert unloaded(scene) == []
    scene.pass_time(2.0)
    assert len(unloaded(scene)) == 2


def test_request_too_large_for_remaining_slots_is_refused() -> None:
    """B6: the largest pool ever seen counted for ever, and its wait asked for one more instance after the other."""
    scene = one_host(
        a_store("s2", "host-2"),
        a_worker("large", kv_pool_bytes=64 * MB),
        *(a_worker(f"small {number}", "host-2", kv_pool_bytes=MB) for number in range(6)),
    )
    scene.kill("large")
    scene.admit(SHORT, "large", num_prompt_tokens=2000, max_tokens=100)
    scene.admit(SHORT, "resumed", attempt=2, num_forced_tokens=1, num_prompt_tokens=2000, max_tokens=100)
    scene.serve(SHORT, "small", num_prompt_tokens=100, max_tokens=10)
    scene.pass_time(9.0)
    assert scene.placement("small") is not None
    assert len(list(scene.policy.state.instances)) == 1, "none of these slots would help the large one"
    assert scene.refusal("large") is None, "its worker may come back"
    scene.pass_time(2.0)
    refusal = scene.refused("large")
    assert refusal.reason is RefusalReason.TOO_LONG and "KV" in refusal.message
    assert scene.refusal("resumed", attempt=2) is None, "somebody has read its first tokens"
    scene.pass_time(50.0, step_s=0.5)
    assert scene.refusal("resumed", attempt=2) is not None


def test_request_goes_to_slot_with_large_enough_pool() -> None:
    """P8: a slot was chosen without a look at its pool."""
    scene = one_host(a_worker("a small", kv_pool_bytes=MB), a_worker("b large", kv_pool_bytes=64 * MB))
    scene.serve(SHORT, "small", num_prompt_tokens=100, max_tokens=10)
    assert scene.placement("small") is not None
    scene.admit(SHORT, "large", num_prompt_tokens=2000, max_tokens=100)
    scene.pass_time(1.0)
    placement = scene.placed("large")
    assert placement.decode.worker_id == "b large"


def test_model_is_loaded_where_the_gpu_holds_its_weights() -> None:
    """It was copied to each GPU in turn until that overflowed."""
    small, large = a_worker("a small", weights_bytes=SHORT.pack_bytes - 1), a_worker("b large", weights_bytes=64 * MB)
    scene = one_host(small, large)
    scene.admit(SHORT, "first")
    scene.pass_time(1.0)
    assert scene.placed("first").prefill.worker_id == "b large"
    scene = one_host(small)
    scene.pass_time(5.0)
    scene.admit(SHORT, "nowhere")
    refusal = scene.refused("nowhere")
    assert refusal.reason is RefusalReason.NO_CAPACITY and not scene.loads()
    assert refusal.message.endswith(f"{SHORT.pack_bytes:,} bytes; the largest slot holds {SHORT.pack_bytes - 1:,}")


def test_unanswered_accepted_load_is_no_failure() -> None:
    """P12: its retry met the load itself as a conflict, and three such refused the model's requests."""
    scene = PaperCluster(obedient=False).settle(a_store("s1", "host-1"), a_worker("w"))
    scene.admit(SHORT, "r1")
    order = scene.loads()[0].hops[0].loads[0]
    scene.apply(CommandEnded(Load(order.instance_id), CommandOutcome.UNANSWERED))
    slot = a_slot(SHORT, order.instance_id, BOTH, InstancePhase.LOADING, 1)
    scene.workers["w"] = replace(scene.workers["w"], slot=slot)
    scene.pass_time(1.0)
    assert len(scene.loads()) == 1 and "load_failed" not in scene.kinds()
    placement = scene.placed("r1")
    assert placement.prefill.instance_id == order.instance_id


def one_prefill_slot() -> tuple[PaperCluster, str]:
    """An instance that plays prefill only, of a model whose request needs both roles."""
    scene = PaperCluster(obedient=False).settle(a_store("s1", "host-1"), a_worker("w"))
    scene.admit(SHORT, "r1")
    order = scene.loads()[0].hops[0].loads[0]
    scene.load(order.instance_id, "w", PREFILL, SHORT)
    scene.set_slot("w", phase=InstancePhase.READY, roles=PREFILL, num_layers_ready=4)
    scene.report("w")
    scene.admit(SHORT, "r2")
    return scene, order.instance_id


def test_refused_role_change_is_no_failed_load_and_backs_off() -> None:
    """P13: three of them refused the model's requests as LOAD_FAILED."""
    scene, _ = one_prefill_slot()
    num_seen = 0
    for _ in range(50):
        scene.pass_time(0.1)
        num_seen, commands = len(scene.commands), scene.commands[num_seen:]
        for command in commands:
            if isinstance(command, SetRolesCommand):
                scene.apply(CommandEnded(RoleChange(command.instance_id), CommandOutcome.REFUSED, "it does not answer"))
    asked = [command for command in scene.commands if isinstance(command, SetRolesCommand)]
    assert 2 <= len(asked) <= 7, "about once a second"
    refusal = scene.refusal("r2")
    assert refusal is None or refusal.reason is not RefusalReason.LOAD_FAILED


def test_earlier_report_does_not_undo_roles() -> None:
    """P15: until its stream said so too, each of the broker's reports was given the slot with the old roles, and the
    roles were ordered anew.
    """
    scene, instance_id = one_prefill_slot()
    scene.pass_time(0.1)
    scene.apply(CommandEnded(RoleChange(instance_id), CommandOutcome.ACCEPTED))
    scene.apply(WorkerReported(replace(scene.workers["w"], seen_at=scene.now), streamed=False))
    instance = scene.policy.state.instances.get(instance_id)
    assert instance is not None and instance.roles == BOTH
    assert len([command for command in scene.commands if isinstance(command, SetRolesCommand)]) == 1


def test_worker_with_orphaned_requests_frees_its_slot() -> None:
    """P14: it kept its slot for ever."""
    scene = two_workers_one_host()
    admission = scene.admit(SHORT, "r1")
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
    scene = one_host("w")
    scene.serve(SHORT, "r1")
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


def test_client_of_cold_model_is_told_to_return_after_its_usual_load() -> None:
    """Q22: the time to come back assumed the configured rate, whatever loads had taken."""
    scene = one_host("w", queue_limit=1)
    scene.admit(SHORT, "first")
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
    scene = one_host("w")
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
    scene = one_host(
        a_worker("large", "host-1", kv_pool_bytes=1024 * MB), a_worker("small", "host-1", kv_pool_bytes=4 * MB)
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


def test_tenant_without_a_slot_takes_none_of_a_worker_that_leaves() -> None:
    """The answers there were cut off, and the slot could not be loaded."""
    scene = one_host("w-a", "w-b")
    for number in range(2):
        scene.serve(a_model(f"acme/m{number}"), f"r{number}")
    leaving = scene.placed("r0").decode.worker_id
    scene.workers[leaving] = replace(scene.workers[leaving], is_leaving=True)
    scene.report(leaving)
    scene.obedient = False
    scene.admit(a_model("birch/other"), "waits")
    scene.pass_time(3.0)
    assert {event.fields["worker_id"] for event in scene.told("first_slot")} == scene.workers.keys() - {leaving}
