"""Instances that an operator wants loaded though nobody asks for their model."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.scheduler.policy.paper_cluster import PaperCluster, a_model, a_store, a_worker, two_workers_one_host
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.core import Model
from torchrelay.scheduler.policy.effects import RefusalReason
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
    scene.pass_time(9.0)
    assert loaded(scene) == [KEPT.name] and scene.placement("r2") is None and scene.refusal("r2") is None


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


def why_refused(scene: PaperCluster, name: str) -> str:
    refusal = scene.refusal(name)
    assert refusal is None or refusal.reason is RefusalReason.NO_CAPACITY
    return refusal.message if refusal is not None else ""


def test_who_needs_a_slot_that_minimums_hold_learns_it_within_ten_seconds() -> None:
    """It waited for ever."""
    scene, same_tenant = one_slot(), a_model("acme/other")
    set_minimums(scene, KEPT)
    scene.admit(OTHER, "r1")
    scene.admit(same_tenant, "r2")
    scene.admit(OTHER, "resumed", attempt=2, num_forced_tokens=5)
    scene.pass_time(9.5)
    assert scene.refusal("r1") is None
    scene.pass_time(1.0)
    assert why_refused(scene, "r1") == (
        "birch/other waits for a slot, and all that could serve it are held by the minimum instances of models of "
        "other tenants."
    )
    assert why_refused(scene, "r2").endswith("by the minimum instances of acme/kept.")
    assert scene.refusal("resumed", attempt=2) is None, "it has given tokens, and waits longer"
    scene.pass_time(50.0)
    assert scene.refusal("resumed", attempt=2) is not None


def test_who_waits_for_a_slot_that_somebody_may_give_up_is_not_refused() -> None:
    scene = PaperCluster().settle(a_store("store-1", "host-1"), a_worker("w-a"), a_worker("w-b"))
    set_minimums(scene, KEPT)
    scene.admit(OTHER, "r1")
    third = a_model("acme/third")
    scene.admit(third, "r2", ttft_target_s=600.0)
    scene.pass_time(15.0)
    assert scene.refusal("r1") is None and scene.refusal("r2") is None
    scene.release("r1")
    scene.pass_time(2.0)
    assert scene.placement("r2") is not None


def test_a_time_without_any_slot_counts_only_if_it_has_not_ended_meanwhile() -> None:
    scene = one_slot()
    set_minimums(scene, KEPT)
    scene.admit(OTHER, "r1")
    scene.pass_time(9.0)
    set_minimums(scene)
    scene.obedient = False
    scene.pass_time(0.2)
    set_minimums(scene, KEPT)
    scene.pass_time(9.0)
    assert scene.refusal("r1") is None


def test_a_request_whose_kv_only_slots_of_minimums_hold_is_refused_alone() -> None:
    small = a_worker("w-small", kv_pool_bytes=1024 * 200)
    scene = PaperCluster().settle(a_store("store-1", "host-1"), a_worker("w-large"))
    set_minimums(scene, KEPT)
    scene.settle(small)
    scene.admit(OTHER, "small")
    scene.admit(OTHER, "large", num_prompt_tokens=1000)
    scene.pass_time(11.0)
    assert scene.placement("small") is not None
    assert "held by the minimum instances" in why_refused(scene, "large")


def test_a_model_for_which_packs_of_minimums_leave_no_memory_is_refused() -> None:
    kept = replace(KEPT, pack_bytes=900 << 20)
    scene = PaperCluster(PolicyConfig(replicate=False))
    scene.settle(a_store("store-1", "host-1"), a_worker("w-a"), a_worker("w-b"))
    set_minimums(scene, kept)
    scene.hold("store-1", kept, num_pins=1)
    scene.report_all()
    scene.admit(replace(OTHER, pack_bytes=200 << 20), "r1")
    scene.pass_time(11.0)
    assert "held by the minimum instances" in why_refused(scene, "r1")
