"""Membership: reports that overtake each other, processes that end and come back."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.scheduler.policy.paper_cluster import MB, a_copy, a_model, a_store, a_worker
from torchrelay.scheduler.policy.cluster.membership import Membership
from torchrelay.scheduler.policy.core import BOTH, InstancePhase, SlotStatus

LOADING = SlotStatus(InstancePhase.LOADING, "i1", "acme/tiny", "v", "p", BOTH, 1, 4)


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
