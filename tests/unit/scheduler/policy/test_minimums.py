"""Instances that an operator wants loaded though nobody asks for their model."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.scheduler.policy.paper_cluster import PaperCluster, a_model, a_store, a_worker, two_workers_one_host
from torchrelay.scheduler.policy.core import Model
from torchrelay.scheduler.policy.inputs import MinimumsSet

KEPT = a_model("acme/kept", min_instances=1, idle_timeout_s=1.0)
OTHER = a_model("birch/other", idle_timeout_s=1.0)


def loaded(scene: PaperCluster) -> list[str]:
    return sorted({instance.model for instance in scene.policy.state.instances if instance.staying})


def set_minimums(scene: PaperCluster, *models: Model) -> None:
    scene.models |= {model.version_id: model for model in models}
    scene.apply(MinimumsSet(models))
    scene.finish_loads()


def one_slot() -> PaperCluster:
    return PaperCluster().settle(a_store("store-1", "host-1"), a_worker("w-a"))


def test_a_minimum_is_loaded_without_a_request_and_stays_until_it_is_none() -> None:
    scene = two_workers_one_host()
    set_minimums(scene, KEPT)
    wake = scene.wakes()[0]
    assert [order.worker_id for hop in wake.hops for order in hop.loads] == ["w-a", "w-b"]
    assert {one.reason for one in scene.events if one.kind == "scale_up"} == {"its minimum is 1 per role"}
    scene.pass_time(20.0)
    assert loaded(scene) == [KEPT.name] and len(scene.wakes()) == 1
    set_minimums(scene)
    scene.pass_time(3.0)
    assert loaded(scene) == []


def test_what_is_beyond_a_minimum_goes_as_ever() -> None:
    scene = PaperCluster().settle(a_store("store-1", "host-1"), *(a_worker(f"w-{n}") for n in range(4)))
    set_minimums(scene, replace(KEPT, min_instances=3))
    assert len(list(scene.policy.state.instances)) == 3
    set_minimums(scene, KEPT)
    scene.pass_time(5.0)
    assert len(list(scene.policy.state.instances)) == 1


def test_a_minimum_takes_the_slot_of_an_idle_model_and_gives_it_to_none() -> None:
    scene = one_slot()
    scene.admit(OTHER, "r1")
    scene.finish_loads()
    set_minimums(scene, KEPT)
    scene.pass_time(0.5)
    assert loaded(scene) == [OTHER.name], "it is used"
    scene.release("r1")
    scene.pass_time(0.9)
    scene.finish_loads()
    assert loaded(scene) == [KEPT.name]
    evicted = next(one.reason for one in scene.events if one.kind == "evict")
    assert "a model of another tenant lacks instances of its minimum, 1 per role" in evicted
    scene.admit(OTHER, "r2")
    scene.pass_time(30.0)
    assert loaded(scene) == [KEPT.name] and scene.placement("r2") is None


def test_a_minimum_whose_worker_is_lost_is_loaded_elsewhere() -> None:
    scene = PaperCluster().settle(a_store("store-1", "host-1"), a_worker("w-a"), a_worker("w-b"))
    set_minimums(scene, KEPT)
    (first,) = scene.policy.state.instances
    scene.kill(first.worker_id)
    (second,) = scene.policy.state.instances
    assert second.worker_id != first.worker_id and second.model == KEPT.name


def test_of_tenants_with_the_same_files_the_larger_minimum_counts() -> None:
    scene = PaperCluster().settle(a_store("store-1", "host-1"), *(a_worker(f"w-{n}") for n in range(4)))
    set_minimums(scene, replace(KEPT, min_instances=2), replace(KEPT, name="birch/same", min_instances=1))
    scene.pass_time(5.0)
    assert len(list(scene.policy.state.instances)) == 2
