"""Instances and membership: what reports mean if they overtake each other, and processes that end and return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scheduler.policy.paper_cluster import (
    MB,
    PaperCluster,
    a_copy,
    a_model,
    a_slot,
    a_store,
    a_worker,
    an_instance,
)
from torchrelay.common.liveness import EngineProgress, Liveness
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.cluster.instances import Instances, InstanceTransition, TransitionKind
from torchrelay.scheduler.policy.cluster.membership import Membership
from torchrelay.scheduler.policy.cluster.open_attempts import OpenAttempts
from torchrelay.scheduler.policy.cluster.slot_sizes import SlotSize, SlotSizes
from torchrelay.scheduler.policy.inputs import PeerGone, StoreReported
from torchrelay.scheduler.policy.storage_tiers import Tier
from torchrelay.scheduler.policy.types import (
    BOTH,
    OWN_ENGINE,
    InstancePhase,
    Peer,
    Role,
    SlotClass,
    SlotStatus,
    StoreStatus,
    WorkerStatus,
)

LOADING = a_slot(a_model(), "i1", BOTH, InstancePhase.LOADING, 1)


def test_open_stream_alone_updates_slot() -> None:
    membership = Membership(fence_s=2.0)
    worker = a_worker("w", seen_at=1.0)
    membership.accept_worker(replace(worker, slot=LOADING), streamed=True)
    late = membership.accept_worker(replace(worker, seen_at=1.1, num_running=3), streamed=False)
    assert late is not None and late.slot == LOADING and late.num_running == 3 and late.seen_at == 1.1
    membership.stream_closed("w")
    now = membership.accept_worker(replace(worker, seen_at=1.2), streamed=False)
    assert now is not None and now.slot.phase is InstancePhase.FREE


@given(
    st.lists(st.tuples(st.sampled_from([0.1, 0.4, 2.0]), st.integers(0, 2), st.booleans(), st.booleans()), max_size=60)
)
def test_hung_peer_is_lost_at_first_check_past_limit(beats: list[tuple[float, int, bool, bool]]) -> None:
    membership, now = Membership(fence_s=2.0), 10.0
    expected: dict[str, Liveness] = {}
    num_advances = 0
    for passed_s, number, advances, has_work in beats:
        now += passed_s
        name = f"w{number}"
        membership.beat_worker(name, f"{name} second", EngineProgress(99), now)  # of another process: does not count
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
    membership.beat_store("s1", "s1 second", 2.0)  # of another process: does not count
    assert [store.store_id for store in membership.expire(3.1, stale_s=3.0).stores] == ["s1", "s2"]
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


def test_second_living_store_of_an_id_is_refused_and_named_once() -> None:
    """Both were taken for one store, whose address changed with every report."""
    scene = PaperCluster().settle(a_store("s1", "host-1"))
    twin = replace(a_store("s1", "host-1"), incarnation="s1 twin", grpc_address="twin:1")

    def report(store: StoreStatus) -> str:
        scene.now += 0.5
        scene.apply(StoreReported(replace(store, seen_at=scene.now), streamed=False))
        return scene.policy.state.membership.stores["s1"].grpc_address

    assert report(twin) == "twin:1", "it may have been restarted"
    for _ in range(8):
        assert report(scene.stores["s1"]) == report(twin) == "twin:1"
    (event,) = scene.told(topic="store.refused")
    assert event.reason.startswith("s1 runs twice: the store at twin:1 counts, that at s1:1 is refused")
    scene.apply(PeerGone(Peer("s1", True)))
    assert report(scene.stores["s1"]) == "s1:1"


def test_idle_or_restarted_stalled_worker_is_present() -> None:
    for back in ({"progress": EngineProgress(7, False)}, {"incarnation": "w second"}):
        membership = Membership(fence_s=2.0)
        stuck = a_worker("w", progress=EngineProgress(7, True))
        membership.accept_worker(stuck, streamed=False)
        membership.beat_worker("w", "w first", stuck.progress, 3.1)
        assert membership.expire(3.1, stale_s=3.0).workers
        assert membership.accept_worker(replace(stuck, seen_at=4.0, **back), streamed=False) is not None


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


def a_load(worker: WorkerStatus, accepted_at: float = 0.0, **changes: object) -> Instance:
    loading: dict[str, object] = {"instance_id": "i1", "since": 1.0, "created_at": 1.0, "accepted_at": accepted_at}
    return an_instance(a_model(), worker, **{"phase": InstancePhase.LOADING} | loading | changes)  # type: ignore[arg-type]


def kinds(transitions: Sequence[InstanceTransition]) -> list[TransitionKind]:
    return [transition.kind for transition in transitions]


def test_free_slot_means_failure_only_after_load_is_reported() -> None:
    instances, worker = Instances(OpenAttempts()), a_worker("w")
    instances.put(a_load(worker))
    assert instances.observe(worker, now=1.1) == []
    instances.put(a_load(worker, accepted_at=1.2))
    assert instances.observe(worker, now=1.3) == []  # sent before the Load
    (moved,) = instances.observe(replace(worker, slot=LOADING), now=1.4)
    assert moved.kind is TransitionKind.MOVED and moved.instance.confirmed and moved.instance.num_layers_ready == 1
    (failed,) = instances.observe(replace(worker, slot=SlotStatus(error="cut off")), now=1.5)
    assert failed.kind is TransitionKind.FAILED and failed.reason.text == "cut off" and instances.get("i1") is None


def test_load_failing_before_any_report_is_noticed() -> None:
    instances, worker = Instances(OpenAttempts()), a_worker("w", slot=SlotStatus(error="no space"))
    again = a_load(worker, accepted_at=1.0, error_before="no space")
    instances.put(again)
    assert instances.observe(worker, now=1.4) == []  # may be the word of the load before
    assert kinds(instances.observe(worker, now=1.6)) == [TransitionKind.FAILED]
    instances.put(again)
    assert kinds(instances.observe(replace(worker, slot=SlotStatus(error="cut off")), now=1.1)) == [
        TransitionKind.FAILED
    ]


def test_instance_of_a_leaving_worker_drains() -> None:
    instances, worker = Instances(OpenAttempts()), a_worker("w", slot=replace(LOADING, phase=InstancePhase.READY))
    instances.put(a_load(worker, accepted_at=1.0, confirmed=True, phase=InstancePhase.READY))
    (moved,) = instances.observe(replace(worker, is_leaving=True), now=2.0)
    assert moved.instance.phase is InstancePhase.DRAINING and not moved.instance.placeable
    assert (moved.instance.since, moved.instance.reason.cause) == (2.0, "worker_leaves")
    assert [instance.instance_id for instance in instances.draining] == ["i1"]


ONE = SlotClass(1, OWN_ENGINE)
SMALL, LARGE = SlotSize(ONE, 100 * MB, 64 * MB), SlotSize(ONE, 200 * MB, 64 * MB)


def test_size_is_present_until_its_last_slot_goes() -> None:
    sizes = SlotSizes()
    sizes.store(a_store("s", "host-1", arena_bytes=100 * MB))
    sizes.worker(a_worker("a"))
    sizes.worker(a_worker("b"))
    sizes.worker_gone("a", now=10.0)
    assert sizes.present(SlotClass(1)) == [SMALL] and sizes.since(0.0, SlotClass(1)) == [SMALL]
    sizes.worker_gone("b", now=20.0)
    assert sizes.present(SlotClass(1)) == [] and sizes.largest_weights_bytes == 0
    assert sizes.since(20.0, SlotClass(1)) == [SMALL] and sizes.since(20.1, SlotClass(1)) == []
    sizes.worker(a_worker("a", seen_at=30.0))
    assert sizes.since(30.0, SlotClass(1)) == [SMALL]


def test_labels_do_not_multiply_sizes() -> None:
    """Each waiting request looked at as many sizes as there were hosts."""
    sizes = SlotSizes()
    for number in range(50):
        sizes.store(a_store(f"s{number}", f"host-{number}", arena_bytes=100 * MB))
        sizes.worker(a_worker(f"w{number}", f"host-{number}", labels=frozenset((f"host={number}",))))
    own = SlotClass(1, labels=frozenset(("host=7",)))
    assert sizes.present(SlotClass(1)) == sizes.present(own) == [SMALL] and sizes.has_weights
    sizes.worker_gone("w7", now=20.0)
    assert sizes.present(own) == [] and sizes.present(SlotClass(1)) == [SMALL]


def test_arena_counts_for_slots_of_its_host() -> None:
    sizes = SlotSizes()
    sizes.worker(a_worker("a"))
    sizes.worker(a_worker("elsewhere", "host-2", num_devices=4))
    assert sizes.largest_weights_bytes == 0
    store = a_store("s", "host-1", arena_bytes=100 * MB)
    sizes.store(store)
    sizes.store(replace(store, arena_target_bytes=200 * MB, seen_at=5.0))
    assert sizes.present(SlotClass(1)) == [LARGE] and sizes.since(5.0, SlotClass(1)) == [LARGE, SMALL]
    sizes.worker(a_worker("a", weights_bytes=100 * MB))  # its GPU holds less than the arena
    gpu = SlotSize(ONE._replace(weights_bytes=100 * MB), 100 * MB, 64 * MB)
    assert sizes.present(SlotClass(1)) == [gpu] and sizes.largest_weights_bytes == 100 * MB
    sizes.store(replace(store, arena_target_bytes=50 * MB, seen_at=6.0))
    assert sizes.largest_weights_bytes == 50 * MB
    sizes.worker(a_worker("a"))
    sizes.store(replace(store, arena_target_bytes=200 * MB, seen_at=7.0))
    sizes.store_gone("host-1", now=9.0)
    assert sizes.largest_weights_bytes == 0 and LARGE in sizes.since(9.0, SlotClass(1))
    assert sizes.present(SlotClass(4)) == [SlotSize(SlotClass(4, OWN_ENGINE), 0, 64 * MB)]
