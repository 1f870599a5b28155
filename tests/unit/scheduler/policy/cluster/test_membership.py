"""Membership: reports that overtake each other, processes that end and come back."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scheduler.policy.paper_cluster import MB, a_copy, a_model, a_store, a_worker
from torchrelay.common.liveness import EngineProgress, Liveness
from torchrelay.scheduler.policy.cluster.membership import LostPeers, Membership
from torchrelay.scheduler.policy.cluster.storage_tiers import Tier
from torchrelay.scheduler.policy.types import BOTH, InstancePhase, Role, SlotStatus

LOADING = SlotStatus(InstancePhase.LOADING, "i1", "acme/tiny", "v", "p", BOTH, 1, 4)


def test_open_stream_alone_updates_slot() -> None:
    membership = Membership(fence_s=2.0)
    worker = a_worker("w", seen_at=1.0)
    membership.accept_worker(replace(worker, slot=LOADING), streamed=True)
    late = membership.accept_worker(replace(worker, seen_at=1.1, num_running=3), streamed=False)
    assert late is not None and late.slot == LOADING and late.num_running == 3 and late.seen_at == 1.1
    membership.stream_closed("w")
    now = membership.accept_worker(replace(worker, seen_at=1.2), streamed=False)
    assert now is not None and now.slot.phase is InstancePhase.FREE


def test_late_report_does_not_revive_dead_process() -> None:
    membership = Membership(fence_s=2.0)
    worker = a_worker("w", seen_at=1.0)
    membership.accept_worker(worker, streamed=True)
    membership.drop_worker("w", now=1.0)
    assert membership.accept_worker(replace(worker, seen_at=1.1), streamed=False) is None
    assert membership.accept_worker(replace(worker, seen_at=1.2, incarnation="w second"), streamed=False) is not None
    assert membership.accept_worker(replace(worker, seen_at=1.3), streamed=False) is None
    assert membership.workers["w"].incarnation == "w second"


def test_silent_peer_is_lost_until_it_reports() -> None:
    membership = Membership(fence_s=2.0)
    worker, store = a_worker("w", seen_at=1.0), a_store("s", "host-1")
    membership.accept_worker(worker, streamed=False)
    membership.accept_store(replace(store, seen_at=3.0))
    assert membership.expire(now=3.9, stale_s=3.0).workers == ()
    lost = membership.expire(now=4.1, stale_s=3.0)
    assert [lost_worker.worker.worker_id for lost_worker in lost.workers] == ["w"] and lost.stores == ()
    assert membership.accept_worker(replace(worker, seen_at=4.2), streamed=False) is not None


@given(
    st.lists(st.tuples(st.sampled_from([0.1, 0.4, 2.0]), st.integers(0, 2), st.booleans(), st.booleans()), max_size=60)
)
def test_hung_peer_is_lost_at_first_check_past_limit(
    beats: list[tuple[float, int, bool, bool]],
) -> None:
    """Not at every look is everybody looked at."""
    membership, now = Membership(fence_s=2.0), 10.0
    expected: dict[str, Liveness] = {}
    num_advances = 0
    for passed_s, number, advances, has_work in beats:
        now += passed_s
        name = f"w{number}"
        num_advances += advances
        progress = EngineProgress(num_advances, has_work)
        if name in membership.workers:
            membership.beat_worker(name, f"{name} first", progress, now)
            expected[name].observe(progress, now)
        elif membership.accept_worker(a_worker(name, seen_at=now, progress=progress), streamed=False) is not None:
            expected[name] = Liveness(now)
            expected[name].observe(progress, now)
        lost = {lost_worker.worker.worker_id for lost_worker in membership.expire(now, stale_s=3.0).workers}
        assert lost == {key for key, liveness in expected.items() if liveness.fault(now, 3.0)}
        expected = {key: liveness for key, liveness in expected.items() if key not in lost}


def test_later_report_ends_suspicion() -> None:
    membership = Membership(fence_s=2.0)
    membership.accept_worker(a_worker("w", seen_at=1.0), streamed=False)
    membership.suspect("w", now=1.05)
    membership.accept_worker(a_worker("w", seen_at=1.1), streamed=False)  # may have been on its way
    assert membership.is_suspect("w")
    membership.accept_worker(a_worker("w", seen_at=1.4), streamed=False)
    assert not membership.is_suspect("w")


def test_later_heartbeat_of_advancing_engine_ends_suspicion() -> None:
    membership = Membership(fence_s=2.0)
    busy = EngineProgress(40, True)
    membership.accept_worker(a_worker("w", seen_at=1.0, progress=busy), streamed=False)
    membership.suspect("w", now=1.05)
    assert not membership.beat_worker("w", "w first", EngineProgress(41, True), now=1.1)  # may have been on its way
    assert not membership.beat_worker("w", "w first", EngineProgress(41, True), now=2.0)  # it hangs
    assert not membership.beat_worker("w", "w other", EngineProgress(42, True), now=2.1)
    assert membership.is_suspect("w")
    assert membership.beat_worker("w", "w first", EngineProgress(42, True), now=2.2)
    assert not membership.is_suspect("w") and not membership.beat_worker("w", "w first", busy, now=2.3)


def test_largest_slot_is_largest_arena_with_worker() -> None:
    membership = Membership(fence_s=2.0)
    assert membership.sizes.largest_weights_bytes == 0
    membership.accept_store(a_store("s1", "host-1", arena_bytes=100 * MB))
    membership.accept_store(a_store("s2", "host-2", arena_bytes=900 * MB))
    membership.accept_worker(a_worker("w", "host-1"), streamed=False)
    assert membership.sizes.largest_weights_bytes == 100 * MB


def test_whole_holders_are_those_with_every_chunk() -> None:
    membership, model = Membership(fence_s=2.0), a_model()
    for store in (a_store("s1", "h1", [a_copy(model)]), a_store("s2", "h2", [a_copy(model, 7)]), a_store("s3", "h3")):
        membership.accept_store(store)
    assert membership.whole_holders(model.pack_id) == ("s1",)


def test_holder_index_equals_scan_of_all_stores() -> None:
    membership, models, random = Membership(fence_s=0.0), [a_model(f"acme/{number}") for number in range(4)], Random(1)
    for at in range(500):
        name = f"s{random.randrange(6)}"
        if random.random() < 0.2:
            membership.drop_store(name, float(at))
        else:
            copies = [
                replace(a_copy(model, random.choice([3, 8])), error=random.choice(["", "full"])) for model in models
            ]
            store = a_store(name, f"host of {name}", random.sample(copies, random.randrange(4)))
            membership.accept_store(replace(store, incarnation=f"{name} {at}", seen_at=float(at)))
        for model in models:
            copies_of = {key: store.copies.get(model.pack_id) for key, store in membership.stores.items()}
            assert [store.store_id for store in membership.holders(model.pack_id)] == [
                key for key, copy in copies_of.items() if copy is not None
            ]
            assert membership.is_held(model.pack_id) == any(copy and not copy.error for copy in copies_of.values())


def test_disk_packs_are_known_until_next_disk_report() -> None:
    membership, on_disk = Membership(fence_s=0.0), frozenset({"p", "q"})
    membership.accept_store(replace(a_store("s1", "host-1"), disk_pack_ids=on_disk))
    membership.accept_store(a_store("s2", "host-2"))
    membership.accept_store(a_store("s1", "host-1"))  # a report that does not say
    assert membership.stores["s1"].disk_pack_ids == on_disk
    assert [store.store_id for store in membership.disk_holders("p")] == ["s1"]
    assert membership.is_on_disk("q") and not membership.is_held("q")
    membership.accept_store(replace(a_store("s1", "host-1"), disk_pack_ids=frozenset({"q"})))
    assert not membership.is_on_disk("p") and membership.is_on_disk("q")
    membership.drop_store("s1", 1.0)
    assert not membership.is_on_disk("q")


def test_disk_packs_survive_return_of_same_process_only() -> None:
    membership, on_disk = Membership(fence_s=0.0), frozenset({"p"})
    store = a_store("s1", "host-1")
    membership.accept_store(replace(store, disk_pack_ids=on_disk))
    membership.drop_store("s1", 1.0, gone=False)
    assert not membership.is_on_disk("p")
    membership.accept_store(replace(store, seen_at=2.0))  # a report through the broker comes first
    assert membership.is_on_disk("p")
    membership.accept_store(replace(store, incarnation="next", seen_at=3.0))
    assert membership.stores["s1"].disk_pack_ids is None and not membership.is_on_disk("p")


def test_stream_heartbeats_keep_peer_without_broker() -> None:
    membership = Membership(fence_s=2.0)
    membership.accept_worker(a_worker("w", seen_at=0.0, num_running=3), streamed=True)
    membership.accept_store(a_store("s", "host-1"))
    for half in range(120):
        now = half / 2
        membership.beat_worker("w", "w first", EngineProgress(half, True), now)
        membership.beat_store("s", "s first", now)
        lost = membership.expire(now, stale_s=3.0)
        assert not lost.workers and not lost.stores
    # They say nothing of the load: that is as old as the last report.
    assert (membership.workers["w"].seen_at, membership.workers["w"].num_running) == (0.0, 3)
    assert [lost_worker.why for lost_worker in membership.expire(62.6, stale_s=3.0).workers] == ["was silent for 3 s"]


def test_heartbeats_of_other_process_do_not_count() -> None:
    membership = Membership(fence_s=2.0)
    membership.accept_worker(a_worker("w", seen_at=0.0), streamed=True)
    membership.accept_store(a_store("s", "host-1"))
    membership.beat_worker("w", "w second", EngineProgress(), 2.0)
    membership.beat_store("s", "s second", 2.0)
    membership.beat_worker("nobody", "n", EngineProgress(), 2.0)
    lost = membership.expire(3.1, stale_s=3.0)
    assert len(lost.workers) == len(lost.stores) == 1


def test_stalled_worker_is_lost_until_engine_advances() -> None:
    membership = Membership(fence_s=2.0)
    stuck = a_worker("w", progress=EngineProgress(7, True, expected_s=1.0))
    for second in range(5):
        assert membership.accept_worker(replace(stuck, seen_at=float(second)), streamed=False) is not None
        assert not membership.expire(float(second), stale_s=3.0).workers
    membership.beat_worker("w", "w first", stuck.progress, 4.1)
    (lost,) = membership.expire(4.1, stale_s=3.0).workers
    assert lost.is_stalled and lost.why == "had work and made no step for 4.1 s"
    for second in range(5, 100):
        assert membership.accept_worker(replace(stuck, seen_at=float(second)), streamed=False) is None
    advanced = replace(stuck, seen_at=101.0, progress=EngineProgress(8, True))
    assert membership.accept_worker(advanced, streamed=False) is not None


def test_idle_or_restarted_stalled_worker_is_present() -> None:
    for back in ({"progress": EngineProgress(7, False)}, {"incarnation": "w second"}):
        membership = Membership(fence_s=2.0)
        stuck = a_worker("w", progress=EngineProgress(7, True))
        membership.accept_worker(stuck, streamed=False)
        membership.beat_worker("w", "w first", stuck.progress, 3.1)
        assert membership.expire(3.1, stale_s=3.0).workers
        assert membership.accept_worker(replace(stuck, seen_at=4.0, **back), streamed=False) is not None


def test_suspicion_stays_while_the_engine_does_not_advance() -> None:
    membership = Membership(fence_s=2.0)
    stuck = a_worker("w", seen_at=1.0, progress=EngineProgress(7, True))
    membership.accept_worker(stuck, streamed=False)
    membership.suspect("w", now=1.5)
    membership.accept_worker(replace(stuck, seen_at=2.5), streamed=False)
    assert membership.is_suspect("w")
    membership.accept_worker(replace(stuck, seen_at=2.6, progress=EngineProgress(8, True)), streamed=False)
    assert not membership.is_suspect("w")


def test_silence_before_listening_loses_no_peer() -> None:
    membership = Membership(fence_s=2.0)
    membership.accept_worker(a_worker("w", progress=EngineProgress(7, True)), streamed=True)
    membership.accept_store(a_store("s", "host-1"))
    assert membership.expire(33.0, stale_s=3.0, listening_since=30.0) == LostPeers((), ())
    lost = membership.expire(33.1, stale_s=3.0, listening_since=30.0)
    assert len(lost.workers) == len(lost.stores) == 1


def test_why_no_model_can_be_loaded() -> None:
    membership = Membership(fence_s=2.0)
    assert membership.why_no_load() == "no worker answers"
    membership.accept_worker(a_worker("p", "host-1", frozenset((Role.PREFILL,))), streamed=False)
    assert membership.why_no_load() == "the param-store of host host-1 does not answer"
    membership.accept_store(a_store("s", "host-1"))
    assert membership.why_no_load() == "no worker that can decode answers"
    membership.accept_worker(a_worker("d", "host-2", frozenset((Role.DECODE,))), streamed=False)
    assert membership.why_no_load() == "no worker that can decode answers"  # its host has no store
    membership.accept_store(a_store("s2", "host-2"))
    assert membership.why_no_load() == ""


def test_free_slot_of_a_leaving_worker_takes_no_load() -> None:
    membership, worker = Membership(fence_s=2.0), a_worker("w", seen_at=1.0)
    membership.accept_worker(worker, streamed=True)
    assert list(membership.free_workers) == ["w"]
    membership.accept_worker(replace(worker, is_leaving=True), streamed=True)
    assert list(membership.free_workers) == [] and list(membership.workers) == ["w"]


def test_nearest_tier_is_that_of_a_host_with_a_slot_of_the_size() -> None:
    membership, model = Membership(fence_s=2.0), a_model()
    assert membership.nearest_tier(model.pack_id, 1) is Tier.REMOTE
    membership.accept_store(a_store("s", "host-1", [a_copy(model)]))
    assert membership.nearest_tier(model.pack_id, 1) is Tier.PEER, "no slot on its host"
    membership.accept_worker(a_worker("w", "host-1"), streamed=False)
    membership.accept_worker(a_worker("w", "host-1", num_running=1), streamed=False)
    assert membership.nearest_tier(model.pack_id, 1) is Tier.HOST
    assert membership.nearest_tier(model.pack_id, 2) is Tier.PEER
    membership.drop_worker("w", now=1.0)
    assert membership.nearest_tier(model.pack_id, 1) is Tier.PEER
