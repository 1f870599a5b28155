"""The view and the fleet: reports on two roads, processes that end and come back."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.scheduler.scene import MB, a_store, a_worker
from torchrelay.scheduler.core import BOTH, Instance, Phase, Slot, Worker
from torchrelay.scheduler.fleet import Fleet, Turn
from torchrelay.scheduler.view import View

LOADING = Slot(Phase.LOADING, "i1", "acme/tiny", "v", "p", BOTH, 1, 4)


def an_instance(worker: Worker, accepted_at: float = 0.0, confirmed: bool = False) -> Instance:
    return Instance(
        "i1", "acme/tiny", "v", "p", worker.worker_id, worker.incarnation, worker.host_id, BOTH, Phase.LOADING,
        1.0, 1.0, 1.0, accepted_at, confirmed,
    )  # fmt: skip


def test_the_slot_is_taken_from_the_stream_while_it_is_open() -> None:
    view = View(fence_s=2.0)
    worker = a_worker("w", seen_at=1.0)
    view.accept_worker(replace(worker, slot=LOADING), streamed=True)
    late = view.accept_worker(replace(worker, seen_at=1.1, num_running=3), streamed=False)
    assert late is not None and late.slot == LOADING and late.num_running == 3 and late.seen_at == 1.1
    view.stream_closed("w")
    now = view.accept_worker(replace(worker, seen_at=1.2), streamed=False)
    assert now is not None and now.slot.phase is Phase.FREE


def test_late_reports_of_a_dead_process_do_not_revive_it() -> None:
    view = View(fence_s=2.0)
    worker = a_worker("w", seen_at=1.0)
    view.accept_worker(worker, streamed=True)
    view.drop_worker("w", now=1.0)
    assert view.accept_worker(replace(worker, seen_at=1.1), streamed=False) is None
    assert view.accept_worker(replace(worker, seen_at=1.2, incarnation="w second"), streamed=False) is not None
    assert view.accept_worker(replace(worker, seen_at=1.3), streamed=False) is None
    assert view.workers["w"].incarnation == "w second"


def test_silence_loses_and_a_report_brings_back() -> None:
    view = View(fence_s=2.0)
    worker, store = a_worker("w", seen_at=1.0), a_store("s", "host-1")
    view.accept_worker(worker, streamed=False)
    view.accept_store(replace(store, seen_at=3.0))
    assert view.expire(now=3.9, stale_s=3.0).workers == ()
    assert view.expire(now=9.0, stale_s=3.0, heard_since=8.0).workers == ()
    lost = view.expire(now=4.1, stale_s=3.0)
    assert [one.worker_id for one in lost.workers] == ["w"] and lost.stores == ()
    assert view.accept_worker(replace(worker, seen_at=4.2), streamed=False) is not None


def test_suspicion_ends_with_a_report_made_after_it() -> None:
    view = View(fence_s=2.0)
    view.accept_worker(a_worker("w", seen_at=1.0), streamed=False)
    view.suspect("w", now=1.05)
    view.accept_worker(a_worker("w", seen_at=1.1), streamed=False)  # may have been on its way
    assert view.is_suspect("w")
    view.accept_worker(a_worker("w", seen_at=1.4), streamed=False)
    assert not view.is_suspect("w")


def test_the_largest_slot_is_the_largest_arena_with_a_worker() -> None:
    view = View(fence_s=2.0)
    assert view.largest_slot_bytes == 0
    view.accept_store(a_store("s1", "host-1", arena_bytes=100 * MB))
    view.accept_store(a_store("s2", "host-2", arena_bytes=900 * MB))
    view.accept_worker(a_worker("w", "host-1", epoch=7), streamed=False)
    assert view.largest_slot_bytes == 100 * MB
    assert view.highest_epoch == 7


def test_a_free_slot_means_nothing_before_the_load_was_answered_and_failure_after_it_showed() -> None:
    fleet, worker = Fleet(), a_worker("w")
    fleet.put(an_instance(worker))
    assert fleet.observe(worker, now=1.1) == []
    fleet.put(an_instance(worker, accepted_at=1.2))
    assert fleet.observe(worker, now=1.3) == []  # sent before the Load
    (moved,) = fleet.observe(replace(worker, slot=LOADING), now=1.4)
    assert moved.turn is Turn.MOVED and moved.instance.confirmed and moved.instance.num_layers_ready == 1
    (failed,) = fleet.observe(replace(worker, slot=Slot(error="cut off")), now=1.5)
    assert failed.turn is Turn.FAILED and failed.reason.text == "cut off" and fleet.get("i1") is None


def test_a_load_that_fails_before_it_ever_showed_is_noticed() -> None:
    fleet, worker = Fleet(), a_worker("w", slot=Slot(error="no room"))
    again = replace(an_instance(worker, accepted_at=1.0), error_before="no room")
    fleet.put(again)
    assert fleet.observe(worker, now=1.4) == []  # may be the word of the load before
    assert [change.turn for change in fleet.observe(worker, now=1.6)] == [Turn.FAILED]
    fleet.put(again)
    broken = replace(worker, slot=Slot(error="cut off"))
    assert [change.turn for change in fleet.observe(broken, now=1.1)] == [Turn.FAILED]


def test_a_restarted_worker_lost_its_instance_and_strangers_are_adopted() -> None:
    fleet, worker = Fleet(), a_worker("w")
    fleet.put(an_instance(worker, accepted_at=1.0, confirmed=True))
    changes = fleet.observe(replace(worker, incarnation="second", slot=replace(LOADING, instance_id="i2")), now=2.0)
    assert [change.turn for change in changes] == [Turn.LOST, Turn.ADOPTED]
    adopted = fleet.on_worker("w")
    assert adopted is not None and adopted.instance_id == "i2" and adopted.placeable


def test_a_decided_drain_is_not_undone_by_an_older_report() -> None:
    fleet, worker = Fleet(), a_worker("w", slot=replace(LOADING, phase=Phase.READY))
    draining = replace(an_instance(worker, accepted_at=1.0, confirmed=True), phase=Phase.DRAINING)
    fleet.put(draining)
    fleet.observe(worker, now=2.0)
    instance = fleet.get("i1")
    assert instance is not None and instance.phase is Phase.DRAINING
    assert [change.turn for change in fleet.observe(replace(worker, slot=Slot()), now=3.0)] == [Turn.RELEASED]
