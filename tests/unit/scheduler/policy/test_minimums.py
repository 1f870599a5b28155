"""Instances without a request: minimums that an operator wants loaded, and forecasts."""

from __future__ import annotations

import math
from dataclasses import replace

from tests.unit.scheduler.policy.paper_cluster import (
    PaperCluster,
    a_model,
    a_store,
    a_worker,
    one_host,
    two_workers_one_host,
)
from torchrelay.scheduler.policy.autoscaling.minimums import Minimums
from torchrelay.scheduler.policy.effects import RefusalReason
from torchrelay.scheduler.policy.inputs import MinimumsSet
from torchrelay.scheduler.policy.storage_tiers import Tier
from torchrelay.scheduler.policy.types import Model, ScheduledMinimum

KEPT = a_model("acme/kept", min_instances=1, idle_timeout_s=1.0)
OTHER = a_model("birch/other", idle_timeout_s=1.0)


def loaded(scene: PaperCluster) -> list[str]:
    return sorted({instance.model for instance in scene.policy.state.instances if instance.staying})


def set_minimums(scene: PaperCluster, *models: Model) -> None:
    scene.models |= {model.version_id: model for model in models}
    scene.apply(MinimumsSet(models))
    scene.finish_loads()


def reasons(scene: PaperCluster, kind: str) -> list[str]:
    return [event.reason for event in scene.told(kind)]


def test_minimum_is_loaded_without_request_until_removed() -> None:
    scene = two_workers_one_host()
    set_minimums(scene, KEPT)
    wake = scene.loads()[0]
    assert [order.worker_id for hop in wake.hops for order in hop.loads] == ["w-a", "w-b"]
    assert set(reasons(scene, "scale_up")) == {"its minimum is 1 per role"}
    scene.pass_time(20.0)
    assert loaded(scene) == [KEPT.name] and len(scene.loads()) == 1
    set_minimums(scene)
    scene.pass_time(3.0)
    assert loaded(scene) == []


def test_minimum_takes_idle_slot_and_keeps_it() -> None:
    scene = one_host("w-a")
    scene.serve(OTHER, "r1")
    set_minimums(scene, KEPT)
    scene.pass_time(0.5)
    assert loaded(scene) == [OTHER.name], "it is used"
    scene.release("r1")
    scene.pass_time(0.9)
    scene.finish_loads()
    assert loaded(scene) == [KEPT.name]
    evicted = next(event for event in scene.told("evict"))
    assert "a model of another tenant lacks instances of its minimum, 1 per role" in evicted.reason
    assert all(math.isfinite(value) for value in evicted.fields.values() if isinstance(value, float)), evicted.fields
    scene.admit(OTHER, "r2")
    scene.pass_time(9.0)
    assert loaded(scene) == [KEPT.name] and scene.placement("r2") is None and scene.refusal("r2") is None


def test_larger_minimum_of_identical_uploads_counts() -> None:
    scene = PaperCluster().settle(a_store("store-1", "host-1"), *(a_worker(f"w-{n}") for n in range(4)))
    set_minimums(scene, replace(KEPT, min_instances=2), replace(KEPT, name="birch/same", min_instances=1))
    scene.pass_time(5.0)
    assert len(list(scene.policy.state.instances)) == 2


ENTRY = "mon-fri 08:00-18:00 Europe/Berlin = 2"


def scheduled(begin: float, end: float, number: int = 1) -> ScheduledMinimum:
    return ScheduledMinimum(begin, end, number, ENTRY)


def test_scheduled_minimum_is_loaded_by_begin_and_ends() -> None:
    scene = one_host("w-0", "w-1", "w-2", "w-3", relay_bytes_per_s=1e6)
    begin = scene.now + 100.0
    timed = a_model("acme/timed", idle_timeout_s=1.0)
    load_s = scene.policy.state.load_times.predict_s(timed, Tier.REMOTE, scene.config)
    assert load_s > 10
    set_minimums(scene, replace(timed, scheduled=(scheduled(begin, begin + 30.0, 2),)))
    assert scene.loads() == []
    while not scene.loads() and scene.now < begin:
        scene.pass_time(0.5)
    assert begin - 2 * load_s < scene.now < begin - load_s, "loaded in time, and not for longer than that needs"
    (said,) = set(reasons(scene, "scale_up"))
    assert said.startswith(f"its minimum is 2 per role, by its schedule '{ENTRY}', which begins in ")
    scene.finish_loads()
    scene.hold("store-1", timed)  # from now on it would load from nearer: it is not given back until then
    scene.pass_time(begin + 29.0 - scene.now)
    assert len(list(scene.policy.state.instances)) == 2 and len(scene.loads()) == 1
    scene.pass_time(5.0)
    assert loaded(scene) == []
    assert reasons(scene, "minimum")[-1] == "its minimum is 0 per role"


def test_greatest_of_overlapping_minimums_counts() -> None:
    minimums = Minimums()
    windows = (scheduled(10, 30, 2), scheduled(20, 40, 3), scheduled(0, 50, 1))
    minimums.set([replace(KEPT, min_instances=1, scheduled=windows[:2]), replace(KEPT, scheduled=windows[2:])])

    def at(now: float) -> int:
        minimums.evaluate(now, lambda model: 0.0)
        return minimums.in_force[KEPT.version_id].number

    assert [at(now) for now in (5, 10, 19.9, 20, 29, 30, 39.9, 40, 60)] == [1, 2, 2, 3, 3, 3, 3, 1, 1]
    minimums.evaluate(5, lambda model: 0.0)
    assert minimums.next_change(KEPT.version_id, 5) == (10, 2)
    minimums.evaluate(35, lambda model: 0.0)
    assert minimums.next_change(KEPT.version_id, 35) == (40, 1)
    minimums.evaluate(60, lambda model: 0.0)
    assert minimums.next_change(KEPT.version_id, 60) is None


def test_schedule_is_hidden_from_other_tenants() -> None:
    scene = one_host("w-a")
    own = replace(KEPT, min_instances=0, scheduled=(scheduled(scene.now, scene.now + 60),))
    scene.models[KEPT.version_id] = own
    scene.apply(MinimumsSet((own, replace(KEPT, name="birch/same", min_instances=0))))
    told = [event for event in scene.events if event.kind in ("minimum", "scale_up")]
    assert len(told) == 2
    assert {said for event in told for said in event.by_tenant.values()} == {"its minimum is 1 per role"}


def why_refused(scene: PaperCluster, name: str) -> str:
    refusal = scene.refusal(name)
    assert refusal is None or refusal.reason is RefusalReason.NO_CAPACITY
    return refusal.message if refusal is not None else ""


def test_request_without_unreserved_slot_is_refused_in_time() -> None:
    """It waited for ever."""
    scene, same_tenant = one_host("w-a"), a_model("acme/other")
    set_minimums(scene, KEPT)
    scene.admit(OTHER, "r1")
    scene.admit(same_tenant, "r2")
    scene.admit(OTHER, "resumed", attempt=2, num_forced_tokens=5)
    scene.pass_time(9.5)
    assert scene.refusal("r1") is None
    scene.pass_time(1.0)
    assert why_refused(scene, "r1") == (
        "birch/other waits for a slot, and all that could serve it are held by the minimum instances of models of "
        "other tenants"
    )
    assert why_refused(scene, "r2").endswith("by the minimum instances of acme/kept")
    assert scene.refusal("resumed", attempt=2) is None, "it has given tokens, and waits longer"
    scene.pass_time(50.0)
    assert scene.refusal("resumed", attempt=2) is not None


def test_request_with_freeable_slot_is_not_refused() -> None:
    scene = one_host("w-a", a_worker("w-b"))
    set_minimums(scene, KEPT)
    scene.admit(OTHER, "r1")
    third = a_model("acme/third")
    scene.admit(third, "r2", ttft_target_s=600.0)
    scene.pass_time(15.0)
    assert scene.refusal("r1") is None and scene.refusal("r2") is None
    scene.release("r1")
    scene.pass_time(2.0)
    assert scene.placement("r2") is not None


def test_request_whose_kv_fits_only_reserved_slots_is_refused() -> None:
    small = a_worker("w-small", kv_pool_bytes=1024 * 200)
    scene = one_host("w-large")
    set_minimums(scene, KEPT)
    scene.settle(small)
    scene.admit(OTHER, "small")
    scene.admit(OTHER, "large", num_prompt_tokens=1000)
    scene.pass_time(11.0)
    assert scene.placement("small") is not None
    assert "held by the minimum instances" in why_refused(scene, "large")


def test_model_without_space_beside_minimum_packs_is_refused() -> None:
    kept = replace(KEPT, pack_bytes=900 << 20)
    scene = one_host("w-a", "w-b", replicate=False)
    set_minimums(scene, kept)
    scene.hold("store-1", kept, num_pins=1)
    scene.report_all()
    scene.admit(replace(OTHER, pack_bytes=200 << 20), "r1")
    scene.pass_time(11.0)
    assert "held by the minimum instances" in why_refused(scene, "r1")


def test_request_for_own_instance_is_not_refused_on_full_host() -> None:
    """Its slot needs no space for a second copy of the weights; it was refused after 10 s."""
    scene = one_host(a_worker("w-a", kv_pool_bytes=1024 * 200), replicate=False)
    scene.serve(OTHER, "r1")
    scene.settle(a_worker("w-b"))
    kept = replace(KEPT, pack_bytes=1000 << 20)
    set_minimums(scene, kept)
    scene.hold("store-1", kept, num_pins=1)
    scene.admit(OTHER, "r2")
    scene.pass_time(15.0)
    assert scene.placement("r2") is None and not why_refused(scene, "r2")
    scene.release("r1")
    assert scene.placement("r2") is not None


MODEL = a_model("acme/every-minute", idle_timeout_s=5.0)
EVERY_S = 60.0


def asked_every_minute(num_times: int) -> PaperCluster:
    scene = one_host("w-a")
    for number in range(num_times):
        scene.serve(MODEL, f"r{number}")
        scene.release(f"r{number}")
        scene.pass_time(EVERY_S, step_s=0.5)
        scene.finish_loads()
    return scene


def test_periodic_model_is_loaded_just_before_use() -> None:
    scene = asked_every_minute(14)
    assert reasons(scene, "scale_up")[:9] == ["at zero, 1 waiting"] * 9
    assert all(cause.startswith("its next request is expected within") for cause in reasons(scene, "scale_up")[10:])
    idle = reasons(scene, "idle")
    assert idle and all(reason.startswith("idle for 5 s (limit 5 s") for reason in idle)


def test_missed_forecast_ends_and_slot_is_freed() -> None:
    scene = asked_every_minute(12)
    before = len(reasons(scene, "scale_up"))
    scene.pass_time(300.0, step_s=0.5)
    assert len(reasons(scene, "scale_up")) == before and not list(scene.policy.state.instances)


def test_needed_slot_goes_to_waiting_model() -> None:
    scene = asked_every_minute(12)
    assert [instance.model for instance in scene.policy.state.instances] == [MODEL.name], "expected now"
    scene.admit(a_model("birch/other"), "other")
    scene.pass_time(1.0)
    assert [instance.model for instance in scene.policy.state.instances] == ["birch/other"]
