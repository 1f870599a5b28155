"""The view and the fleet: reports on two roads, processes that end and come back."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.scheduler.policy.paper_cluster import MB, a_copy, a_model, a_store, a_worker
from torchrelay.scheduler.policy.cluster.instances import Instances, TransitionKind
from torchrelay.scheduler.policy.cluster.membership import Membership
from torchrelay.scheduler.policy.core import BOTH, Instance, InstancePhase, SlotStatus, WorkerStatus

LOADING = SlotStatus(InstancePhase.LOADING, "i1", "acme/tiny", "v", "p", BOTH, 1, 4)


def an_instance(worker: WorkerStatus, accepted_at: float = 0.0, confirmed: bool = False) -> Instance:
    return Instance(
        "i1", "acme/tiny", "v", "p", worker.worker_id, worker.incarnation, worker.host_id, BOTH, InstancePhase.LOADING,
        1.0, 1.0, 1.0, accepted_at, confirmed,
    )  # fmt: skip


def test_the_slot_is_taken_from_the_stream_while_it_is_open() -> None:
    membership = Membership(fence_s=2.0)
    worker = a_worker("w", seen_at=1.0)
    membership.accept_worker(replace(worker, slot=LOADING), streamed=True)
    late = membership.accept_worker(replace(worker, seen_at=1.1, num_running=3), streamed=False)
    assert late is not None and late.slot == LOADING and late.num_running == 3 and late.seen_at == 1.1
    membership.stream_closed("w")
    now = membership.accept_worker(replace(worker, seen_at=1.2), streamed=False)
    assert now is not None and now.slot.phase is InstancePhase.FREE


def test_late_reports_of_a_dead_process_do_not_revive_it() -> None:
    membership = Membership(fence_s=2.0)
    worker = a_worker("w", seen_at=1.0)
    membership.accept_worker(worker, streamed=True)
    membership.drop_worker("w", now=1.0)
    assert membership.accept_worker(replace(worker, seen_at=1.1), streamed=False) is None
    assert membership.accept_worker(replace(worker, seen_at=1.2, incarnation="w second"), streamed=False) is not None
    assert membership.accept_worker(replace(worker, seen_at=1.3), streamed=False) is None
    assert membership.workers["w"].incarnation == "w second"


def test_silence_loses_and_a_report_brings_back() -> None:
    membership = Membership(fence_s=2.0)
    worker, store = a_worker("w", seen_at=1.0), a_store("s", "host-1")
    membership.accept_worker(worker, streamed=False)
    membership.accept_store(replace(store, seen_at=3.0))
    assert membership.expire(now=3.9, stale_s=3.0).workers == ()
    assert membership.expire(now=9.0, stale_s=3.0, reports_complete_since=8.0).workers == ()
    lost = membership.expire(now=4.1, stale_s=3.0)
    assert [one.worker_id for one in lost.workers] == ["w"] and lost.stores == ()
    assert membership.accept_worker(replace(worker, seen_at=4.2), streamed=False) is not None


def test_suspicion_ends_with_a_report_made_after_it() -> None:
    membership = Membership(fence_s=2.0)
    membership.accept_worker(a_worker("w", seen_at=1.0), streamed=False)
    membership.suspect("w", now=1.05)
    membership.accept_worker(a_worker("w", seen_at=1.1), streamed=False)  # may have been on its way
    assert membership.is_suspect("w")
    membership.accept_worker(a_worker("w", seen_at=1.4), streamed=False)
    assert not membership.is_suspect("w")


def test_the_largest_slot_is_the_largest_arena_with_a_worker() -> None:
    membership = Membership(fence_s=2.0)
    assert membership.largest_slot_bytes == 0
    membership.accept_store(a_store("s1", "host-1", arena_bytes=100 * MB))
    membership.accept_store(a_store("s2", "host-2", arena_bytes=900 * MB))
    membership.accept_worker(a_worker("w", "host-1"), streamed=False)
    assert membership.largest_slot_bytes == 100 * MB


def test_whole_holders_are_those_with_every_chunk() -> None:
    membership, model = Membership(fence_s=2.0), a_model()
    for store in (a_store("s1", "h1", [a_copy(model)]), a_store("s2", "h2", [a_copy(model, 7)]), a_store("s3", "h3")):
        membership.accept_store(store)
    assert membership.whole_holders(model.pack_id) == ("s1",)


def test_a_free_slot_means_nothing_before_the_load_was_answered_and_failure_after_it_showed() -> None:
    instances, worker = Instances(), a_worker("w")
    instances.put(an_instance(worker))
    assert instances.observe(worker, now=1.1) == []
    instances.put(an_instance(worker, accepted_at=1.2))
    assert instances.observe(worker, now=1.3) == []  # sent before the Load
    (moved,) = instances.observe(replace(worker, slot=LOADING), now=1.4)
    assert moved.kind is TransitionKind.MOVED and moved.instance.confirmed and moved.instance.num_layers_ready == 1
    (failed,) = instances.observe(replace(worker, slot=SlotStatus(error="cut off")), now=1.5)
    assert failed.kind is TransitionKind.FAILED and failed.reason.text == "cut off" and instances.get("i1") is None


def test_a_load_that_fails_before_it_ever_showed_is_noticed() -> None:
    instances, worker = Instances(), a_worker("w", slot=SlotStatus(error="no room"))
    again = replace(an_instance(worker, accepted_at=1.0), error_before="no room")
    instances.put(again)
    assert instances.observe(worker, now=1.4) == []  # may be the word of the load before
    assert [change.kind for change in instances.observe(worker, now=1.6)] == [TransitionKind.FAILED]
    instances.put(again)
    broken = replace(worker, slot=SlotStatus(error="cut off"))
    assert [change.kind for change in instances.observe(broken, now=1.1)] == [TransitionKind.FAILED]


def test_a_restarted_worker_lost_its_instance_and_strangers_are_adopted() -> None:
    instances, worker = Instances(), a_worker("w")
    instances.put(an_instance(worker, accepted_at=1.0, confirmed=True))
    changes = instances.observe(replace(worker, incarnation="second", slot=replace(LOADING, instance_id="i2")), now=2.0)
    assert [change.kind for change in changes] == [TransitionKind.LOST, TransitionKind.ADOPTED]
    adopted = instances.on_worker("w")
    assert adopted is not None and adopted.instance_id == "i2" and adopted.placeable


def test_a_decided_drain_is_not_undone_by_an_older_report() -> None:
    instances, worker = Instances(), a_worker("w", slot=replace(LOADING, phase=InstancePhase.READY))
    draining = replace(an_instance(worker, accepted_at=1.0, confirmed=True), phase=InstancePhase.DRAINING)
    instances.put(draining)
    instances.observe(worker, now=2.0)
    instance = instances.get("i1")
    assert instance is not None and instance.phase is InstancePhase.DRAINING
    assert [change.kind for change in instances.observe(replace(worker, slot=SlotStatus()), now=3.0)] == [
        TransitionKind.RELEASED
    ]
