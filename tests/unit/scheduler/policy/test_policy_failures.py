"""The policy when things fail: workers that die or fall silent, loads that fail."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.scheduler.policy.paper_cluster import (
    PaperCluster,
    a_model,
    a_store,
    a_worker,
    hosts,
    two_workers_one_host,
)
from torchrelay.scheduler.policy.core import Role, SlotStatus
from torchrelay.scheduler.policy.effects import RefusalReason, SetRolesCommand
from torchrelay.scheduler.policy.inputs import Tick, WorkerStopped

PREFILL, DECODE = frozenset((Role.PREFILL,)), frozenset((Role.DECODE,))


def test_a_lost_decode_worker_gives_its_role_to_the_prefill_instance() -> None:
    scene = two_workers_one_host()
    model = a_model()
    scene.admit(model, "r1")
    scene.finish_loads()
    placement = scene.placement("r1")
    assert placement is not None
    scene.kill(placement.decode.worker_id)
    scene.admit(model, "r1", attempt=2, num_forced_tokens=7, lost_workers=(placement.decode.worker_id,))
    resumed = scene.placement("r1", attempt=2)
    assert resumed is not None
    assert resumed.decode.instance_id == resumed.prefill.instance_id == placement.prefill.instance_id
    assert not resumed.cold
    # The worker's successor is a free slot again; nothing is moved back.
    commands = len(scene.commands)
    scene.settle(a_worker(placement.decode.worker_id, incarnation="second"))
    assert len(scene.commands) == commands


def test_a_worker_that_says_goodbye_is_stopped_and_its_late_reports_count_no_more() -> None:
    scene = two_workers_one_host()
    scene.admit(a_model(), "r1")
    scene.finish_loads()
    scene.apply(WorkerStopped("w-a"))
    scene.report("w-a")  # was on its way
    assert [one.worker_id for one in scene.policy.state.instances] == ["w-b"]
    (stopped,) = (one for one in scene.events if one.topic == "instance.stopped")
    assert (stopped.fields["cause"], stopped.fields["worker_id"]) == ("worker_stopped", "w-a")
    assert not [one for one in scene.events if one.topic == "instance.lost"]


def test_what_is_lost_says_how() -> None:
    scene = two_workers_one_host()
    scene.admit(a_model(), "r1")
    scene.finish_loads()
    scene.kill("w-a")
    del scene.workers["w-b"]  # silent from here on
    scene.pass_time(4.0)
    lost = [one.fields["cause"] for one in scene.events if one.topic == "instance.lost"]
    assert lost == ["worker_gone", "worker_silent"]


def test_a_lost_prefill_worker_likewise() -> None:
    scene = two_workers_one_host()
    model = a_model()
    scene.admit(model, "r1")
    scene.finish_loads()
    placement = scene.placement("r1")
    assert placement is not None
    scene.kill(placement.prefill.worker_id)
    scene.admit(model, "r2")
    roles = [command for command in scene.commands if isinstance(command, SetRolesCommand)]
    assert [command.instance_id for command in roles] == [placement.decode.instance_id]
    assert scene.placement("r2") is not None


def test_a_lost_decode_worker_is_replaced_by_a_free_slot_if_there_is_one() -> None:
    scene = two_workers_one_host()
    scene.settle(a_worker("w-c"))
    model = a_model()
    scene.admit(model, "r1")
    placement = scene.placement("r1")
    assert placement is not None
    scene.kill(placement.decode.worker_id)
    scene.admit(model, "r1", attempt=2)
    resumed = scene.placement("r1", attempt=2)
    assert resumed is not None and resumed.prefill == placement.prefill
    assert resumed.decode.worker_id not in (placement.decode.worker_id, placement.prefill.worker_id)


def test_a_worker_a_gateway_saw_fail_is_not_used_before_it_reports_again() -> None:
    scene = two_workers_one_host()
    model = a_model()
    scene.admit(model, "r1")
    scene.finish_loads()
    placement = scene.placement("r1")
    assert placement is not None
    scene.admit(model, "r1", attempt=2, lost_workers=(placement.decode.worker_id,))
    early = scene.placement("r1", attempt=2)
    assert early is None or early.decode.worker_id != placement.decode.worker_id
    scene.pass_time(1.0)
    scene.admit(model, "r2")
    assert scene.placement("r2") is not None


def test_a_request_that_comes_again_without_a_token_is_not_sent_to_the_same_place_at_once() -> None:
    scene = two_workers_one_host()
    model = a_model()
    scene.admit(model, "r1")
    scene.release("r1", delivered=False)  # its workers said that the load failed; their own word is still on its way
    scene.admit(model, "r1", attempt=2)
    assert scene.placement("r1", attempt=2) is None
    scene.pass_time(0.5)  # they report, and are well after all
    assert scene.placement("r1", attempt=2) is not None
    assert len(scene.wakes()) == 1


def test_silence_of_three_seconds_is_loss() -> None:
    scene = two_workers_one_host()
    model = a_model()
    scene.admit(model, "r1")
    scene.finish_loads()
    placement = scene.placement("r1")
    assert placement is not None
    del scene.workers[placement.decode.worker_id]
    scene.pass_time(2.5)
    assert "lost" not in scene.kinds()
    scene.pass_time(1.0)
    assert "lost" in scene.kinds()


def test_nobody_is_lost_while_the_broker_is_away() -> None:
    scene = two_workers_one_host()
    scene.now += 10
    scene.apply(Tick(reports_complete_since=scene.now))
    assert len(scene.policy.state.membership.workers) == 2


def test_a_load_that_fails_is_tried_elsewhere() -> None:
    scene = hosts(2)
    model = a_model()
    scene.failing_workers = {"p-1", "d-1"}
    scene.admit(model, "r1")
    scene.pass_time(1.0)
    placement = scene.placement("r1")
    assert placement is not None and placement.prefill.worker_id in ("p-2", "d-2")


def test_after_all_tries_those_who_wait_are_told_the_cause() -> None:
    model = a_model()
    scene = two_workers_one_host()
    scene.failing_workers = {"w-a", "w-b"}
    scene.admit(model, "r1")
    scene.pass_time(2.0)
    refusal = scene.refusal("r1")
    assert refusal is not None and refusal.reason is RefusalReason.LOAD_FAILED and "is broken" in refusal.message
    wakes = len(scene.wakes())
    assert wakes == scene.config.load_tries
    scene.failing_workers.clear()
    scene.admit(model, "r2")
    assert len(scene.wakes()) == wakes  # after the longest back-off only
    scene.pass_time(scene.config.load_backoff_max_s + 0.2)
    assert scene.placement("r2") is not None


def test_a_load_that_fails_after_it_was_accepted_counts_as_a_try() -> None:
    scene = PaperCluster().settle(a_store("store-1", "host-1"), a_worker("w-a"))
    scene.admit(a_model(), "r1")
    assert scene.placement("r1") is not None
    scene.workers["w-a"] = replace(scene.workers["w-a"], slot=SlotStatus(error="no holder left"))
    scene.report("w-a")
    failed = [happening for happening in scene.events if happening.kind == "load_failed"]
    assert [happening.reason for happening in failed] == ["no holder left"]
    scene.admit(a_model(), "r1", attempt=2)
    scene.pass_time(0.5)
    assert scene.placement("r1", attempt=2) is not None
