"""Models that are asked for at regular intervals are loaded before they are asked for."""

from __future__ import annotations

from tests.unit.scheduler.policy.paper_cluster import PaperCluster, a_model, a_store, a_worker

MODEL = a_model("acme/every-minute", idle_timeout_s=5.0)
EVERY_S = 60.0


def asked_every_minute(num_times: int) -> PaperCluster:
    scene = PaperCluster().settle(a_store("store-1", "host-1"), a_worker("w-a"))
    for number in range(num_times):
        scene.admit(MODEL, f"r{number}")
        scene.finish_loads()
        scene.release(f"r{number}")
        scene.pass_time(EVERY_S, step_s=0.5)
        scene.finish_loads()
    return scene


def causes(scene: PaperCluster) -> list[str]:
    return [event.reason for event in scene.events if event.kind == "scale_up"]


def test_periodic_model_is_loaded_just_before_use() -> None:
    scene = asked_every_minute(14)
    assert causes(scene)[:9] == ["at zero, 1 waiting"] * 9
    assert all(cause.startswith("its next request is expected within") for cause in causes(scene)[10:])
    idle = [event.reason for event in scene.events if event.kind == "idle"]
    assert idle[0].startswith("idle for 5 s") and idle[-1].startswith("idle for 250 ms (limit 0 ms")  # at the next turn


def test_missed_forecast_ends_and_slot_is_freed() -> None:
    scene = asked_every_minute(12)
    before = len(causes(scene))
    scene.pass_time(300.0, step_s=0.5)
    assert len(causes(scene)) == before and not list(scene.policy.state.instances)


def test_needed_slot_goes_to_waiting_model() -> None:
    scene = asked_every_minute(12)
    assert [instance.model for instance in scene.policy.state.instances] == [MODEL.name], "expected now"
    scene.admit(a_model("birch/other"), "other")
    scene.pass_time(1.0)
    assert [instance.model for instance in scene.policy.state.instances] == ["birch/other"]
