"""The replicator inside the policy: what it orders and why, what it remembers, and what stores retain."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.scheduler.policy.paper_cluster import PaperCluster, a_copy, a_model, a_store, a_worker
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.effects import CopyCommand, RetainCommand, SchedulerEvent
from torchrelay.scheduler.policy.inputs import CommandEnded, CommandOutcome, Copy, Retention, StoreGone, StoreReported
from torchrelay.scheduler.policy.types import Model, StoreStatus

MODEL = a_model()


def in_rack(number: int, rack: str, *models: Model) -> StoreStatus:
    store = a_store(f"store-{number}", f"host-{number}", [a_copy(model) for model in models])
    return replace(store, failure_domain=rack)


def racks(obedient: bool = True, **config: object) -> PaperCluster:
    """Three stores, two of them in one rack; the first has the model's pack, and somebody asks for the model."""
    scene = PaperCluster(PolicyConfig(**config), obedient)  # type: ignore[arg-type]
    scene.settle(in_rack(1, "r1", MODEL), in_rack(2, "r1"), in_rack(3, "r2"))
    scene.admit(MODEL, "r1")
    return scene


def copies(scene: PaperCluster) -> list[CopyCommand]:
    return [command for command in scene.commands if isinstance(command, CopyCommand)]


def retained_packs(scene: PaperCluster) -> list[RetainCommand]:
    return [command for command in scene.commands if isinstance(command, RetainCommand)]


def of_kind(scene: PaperCluster, kind: str) -> list[SchedulerEvent]:
    return [event for event in scene.events if event.kind == kind]


def test_used_model_gets_retained_copies_in_two_racks() -> None:
    scene = racks()
    scene.pass_time(2.0)
    (command,) = copies(scene)
    assert command.hop.store_id == "store-3" and command.hop.sources[0] == "store-1" and not command.hop.loads
    assert not command.urgent and command.keep_retained and command.model == MODEL
    assert scene.retained_packs == {"store-1": (MODEL.pack_id,), "store-3": (MODEL.pack_id,)}
    (why,) = of_kind(scene, "replicate")
    assert why.model == MODEL.name and "only on store-1" in why.reason and why.topic == "copy.replicate"
    assert why.fields["store_id"] == "store-3" and why.fields["source"] == "store-1"
    assert len(of_kind(scene, "copied")) == 1
    assert not scene.policy.state.transfers.num_running and scene.policy.state.copies.num_short == 0


def test_no_copy_is_ordered_before_stores_report() -> None:
    scene = PaperCluster()
    scene.stores["store-1"] = in_rack(1, "r1", MODEL)
    scene.stores["store-2"] = in_rack(2, "r2")
    scene.admit(MODEL, "r1")
    scene.pass_time(scene.config.refusal_settle_s - 0.2)
    assert not copies(scene)
    scene.pass_time(1.0)
    assert len(copies(scene)) == 1


def test_pack_without_copies_returns_from_remote_store() -> None:
    scene = racks()
    scene.pass_time(2.0)
    for store_id in ("store-1", "store-3"):
        del scene.stores[store_id]
        scene.apply(StoreGone(store_id))
    scene.pass_time(4.0)
    again = copies(scene)[1]
    assert again.urgent and again.hop.store_id == "store-2" and again.hop.sources == ("remote",)
    assert "last copy was lost" in of_kind(scene, "rebuild")[0].reason


def test_refused_and_broken_copies_have_failed() -> None:
    scene = racks(obedient=False)
    scene.pass_time(1.0)
    scene.apply(CommandEnded(Copy(MODEL.pack_id, "store-3"), CommandOutcome.REFUSED, "the arena is full"))
    assert not scene.policy.state.transfers.num_running
    scene.pass_time(0.9)
    assert [command.hop.store_id for command in copies(scene)] == ["store-3", "store-2"]
    scene.apply(CommandEnded(Copy(MODEL.pack_id, "store-2"), CommandOutcome.ACCEPTED))
    scene.hold("store-2", MODEL, num_chunks_verified=3, error="its source died")
    scene.pass_time(6.0)
    assert copies(scene)[-1].hop.store_id == "store-3"
    assert [event.fields["error"] for event in of_kind(scene, "copy_failed")] == [
        "the arena is full",
        "its source died",
    ]


def test_deleted_pack_is_forgotten_at_first_refusal() -> None:
    scene = racks(obedient=False)
    del scene.stores["store-1"]
    scene.apply(StoreGone("store-1"))
    while not copies(scene):
        scene.pass_time(0.1)
    scene.apply(
        CommandEnded(Copy(MODEL.pack_id, copies(scene)[0].hop.store_id), CommandOutcome.NOT_FOUND, "no such pack")
    )
    assert "no such pack" in of_kind(scene, "copy_failed")[0].reason
    scene.pass_time(300.0)
    assert len(copies(scene)) == 1
    assert MODEL.pack_id not in scene.policy.state.copies.packs


def test_lease_is_retried_after_refusal() -> None:
    scene = racks()
    scene.pass_time(2.0)
    begin = len(retained_packs(scene))
    scene.apply(CommandEnded(Retention("store-3"), CommandOutcome.REFUSED))
    scene.pass_time(2.5)
    assert [command.store_id for command in retained_packs(scene)[begin:]] == ["store-3"]


def test_instance_counts_as_use_and_its_pack_as_copy() -> None:
    scene = PaperCluster(PolicyConfig(recent_s=3.0)).settle(
        in_rack(1, "r1", MODEL), in_rack(2, "r2"), a_worker("w-a", "host-1")
    )
    scene.serve(MODEL, "r1")
    scene.release("r1")
    scene.pass_time(10.0)
    assert [command.hop.store_id for command in copies(scene)] == ["store-2"]
    assert scene.retained_packs["store-1"] == (MODEL.pack_id,)


def test_eviction_is_recorded_with_worth_once_the_stream_shows_it() -> None:
    scene = racks()
    scene.pass_time(2.0)
    empty = replace(scene.stores["store-1"], copies={})
    scene.apply(StoreReported(replace(empty, seen_at=scene.now), streamed=False))  # it may be older than the stream's
    scene.pass_time(1.0)
    assert not of_kind(scene, "evicted")
    scene.stores["store-1"] = empty
    scene.pass_time(1.0)
    (event,) = of_kind(scene, "evicted")
    assert event.topic == "copy.evicted" and event.fields["store_id"] == "store-1"
    assert event.reason.startswith("no longer in the RAM of store-1; its next use is expected in ")


def test_new_scheduler_adopts_retained_packs() -> None:
    scene = PaperCluster()
    retained = replace(a_copy(MODEL), retained=True)
    first = replace(in_rack(1, "r1"), copies={MODEL.pack_id: retained})
    scene.settle(first, in_rack(2, "r2"))
    scene.pass_time(2.0)
    assert [command.hop.store_id for command in copies(scene)] == ["store-2"]
    assert scene.retained_packs["store-1"] == (MODEL.pack_id,)
