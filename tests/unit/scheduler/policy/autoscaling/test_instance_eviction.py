"""Evictions for a model without any slot: also when others fill the arena, not the slots; and turns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.scheduler.policy.paper_cluster import MB, PaperCluster, a_copy, a_model, a_store, a_worker
from torchrelay.scheduler.policy.core import InstancePhase


def report_pins(scene: PaperCluster, store_id: str) -> None:
    """The store pins what is in a slot, as its workers hold it."""
    models = {model.pack_id: model for model in scene.models.values()}
    packs = [worker.slot.pack_id for worker in scene.workers.values() if worker.slot.phase is not InstancePhase.FREE]
    copies = {pack_id: replace(a_copy(models[pack_id]), num_pins=packs.count(pack_id)) for pack_id in packs}
    scene.stores[store_id] = replace(scene.stores[store_id], copies=copies)


def test_idle_models_make_room_in_an_arena_they_fill() -> None:
    first, second = a_model("acme/first"), a_model("acme/second")
    arena = first.pack_bytes + second.pack_bytes - MB
    scene = PaperCluster().settle(a_store("store-1", "host-1", arena_bytes=arena), a_worker("w-a"), a_worker("w-b"))
    scene.admit(first, "r1")
    scene.finish_loads()
    report_pins(scene, "store-1")
    scene.admit(second, "r2")
    scene.pass_time(3.0)
    assert scene.placement("r2") is None and "drain" not in scene.kinds()  # r1 runs, and its weights are in the way
    scene.release("r1")
    for _ in range(10):
        report_pins(scene, "store-1")
        scene.pass_time(0.1)
    assert scene.placement("r2") is not None


def test_models_that_are_always_busy_take_turns_in_a_single_slot() -> None:
    scene = PaperCluster().settle(a_store("store-1", "host-1"), a_worker("w-a"))
    models = [a_model("acme/first"), a_model("acme/second"), a_model("acme/third")]
    for model in models:
        scene.admit(model, f"{model.name} 0")
    turns: list[str] = []
    for number in range(1, 600):
        for model in models:  # each always has a request open
            if scene.placement(f"{model.name} {number - 1}"):
                scene.admit(model, f"{model.name} {number}")
                scene.release(f"{model.name} {number - 1}")
            else:
                scene.admit(model, f"{model.name} {number}")
        scene.finish_loads()
        scene.pass_time(0.1)
        hosted = scene.workers["w-a"].slot.model
        if hosted and turns[-1:] != [hosted]:
            turns.append(hosted)
    assert set(turns) == {model.name for model in models}
    assert (
        4 <= len(turns) <= 7
    )  # in 60 s with turns of 10 s: nobody starves, and slots are not swapped for each request


@pytest.mark.parametrize("rests_s", [None, 60.0])
@pytest.mark.parametrize(("waiting", "shown"), [("acme/second", True), ("rival/secret", False)])
def test_a_tenant_reads_no_name_of_another_tenants_model(waiting: str, shown: bool, rests_s: float | None) -> None:
    scene = PaperCluster().settle(a_store("store-1", "host-1"), a_worker("w-a"))
    scene.admit(a_model("acme/first"), "r1")
    scene.finish_loads()
    if rests_s is None:  # idle, and evicted; else busy, and its turn ends
        scene.release("r1")
    scene.admit(a_model(waiting), "r2")
    scene.pass_time(rests_s or 1.0)
    told = [one.reason for one in scene.events if one.model == "acme/first" and one.kind == "drain"]
    assert told and [waiting in reason for reason in told] == [shown] * len(told)
    assert not any("rival" in one.reason for one in scene.events if one.model == "acme/first")
