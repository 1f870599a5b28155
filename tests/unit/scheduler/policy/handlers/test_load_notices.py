"""Gateways learn how long the loads take for which their requests wait, from the layers that arrive."""

from __future__ import annotations

from tests.unit.scheduler.policy.paper_cluster import PaperCluster, a_model, one_host, two_workers_one_host
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.effects import LoadNotice
from torchrelay.scheduler.policy.inputs import GatewayChanged, Withdraw
from torchrelay.scheduler.policy.types import AttemptKey

MODEL = a_model()


def notices_of(scene: PaperCluster) -> list[LoadNotice]:
    return [notice for effects in scene.effects for notice in effects.notices]


def load_layers(scene: PaperCluster, number: int, layer_s: float) -> None:
    """Layers up to this number arrive, ``layer_s`` after each other, on all loading workers."""
    loading = [worker_id for worker_id, worker in scene.workers.items() if worker.slot.instance_id]
    for ready in range(scene.workers[loading[0]].slot.num_layers_ready + 1, number + 1):
        scene.pass_time(layer_s)
        for worker_id in loading:
            scene.set_slot(worker_id, num_layers_ready=ready)
            scene.report(worker_id)


def test_told_time_falls_as_layers_arrive() -> None:
    scene = two_workers_one_host()
    scene.admit(MODEL, "r", num_prompt_tokens=1)
    assert [(notice.has_slot, notice.num_layers) for notice in notices_of(scene)] == [(True, 0)]
    load_layers(scene, 3, 2.0)
    scene.pass_time(1.0)
    told = [notice for notice in notices_of(scene) if notice.num_layers_ready]
    assert [notice.num_layers_ready for notice in told] == sorted(notice.num_layers_ready for notice in told)
    assert {notice.num_layers_ready for notice in told} == {1, 2, 3} and {notice.num_layers for notice in told} == {4}
    assert 1.0 <= told[-1].left_s <= 2.2  # a second is left of eight, and the last notice is up to 1.1 s old
    left_s = [notice.left_s for notice in told]
    assert left_s == sorted(left_s, reverse=True)


def test_loaded_model_of_suspect_worker_is_not_said_to_load() -> None:
    scene, model = one_host("w"), a_model()
    scene.serve(model, "first")
    num_told = len(notices_of(scene))
    scene.admit(model, "r", attempt=2, lost_workers=("w",))
    scene.pass_time(2.0)
    assert len(notices_of(scene)) == num_told


def test_told_once_a_second_while_requests_wait_for_a_load() -> None:
    scene = two_workers_one_host()
    scene.apply(GatewayChanged("gateway-2", True))
    scene.admit(MODEL, "r")
    scene.admit(MODEL, "s", gateway_id="gateway-2")
    scene.pass_time(3.05)
    told = [notice.gateway_id for notice in notices_of(scene)]
    assert told == ["gateway-1", *["gateway-1", "gateway-2"] * 3]
    scene.apply(Withdraw(AttemptKey("s", 1)))
    scene.pass_time(1.0)
    assert [notice.gateway_id for notice in notices_of(scene)[len(told) :]] == ["gateway-1"]
    scene.finish_loads()
    num_told = len(notices_of(scene))
    scene.pass_time(3.0)
    scene.admit(MODEL, "t")
    scene.pass_time(3.0)
    assert len(notices_of(scene)) == num_told


def test_model_without_a_slot_is_told_so() -> None:
    scene = one_host("w")
    busy, model = a_model("acme/busy"), a_model("acme/other")
    scene.serve(busy, "r")
    scene.admit(model, "s")
    told = [notice for notice in notices_of(scene) if notice.version_id == model.version_id]
    assert [(notice.has_slot, notice.num_layers) for notice in told] == [(False, 0)]
    assert told[0].left_s >= scene.policy.state.expected_load_s(model)


def test_time_covers_the_prompts_that_wait() -> None:
    scene = two_workers_one_host()
    scene.admit(MODEL, "r", num_prompt_tokens=1)
    alone_s = notices_of(scene)[-1].left_s
    for number in range(20):
        scene.admit(MODEL, f"s-{number}", num_prompt_tokens=500)
    scene.pass_time(1.0)
    assert notices_of(scene)[-1].left_s >= alone_s + 9.0  # ten thousand tokens at a thousand per second


def test_retry_time_of_a_cold_model_falls_as_layers_arrive() -> None:
    scene = one_host("w", queue_limit=1)
    scene.admit(MODEL, "r", num_prompt_tokens=10)
    told_s = []
    for num_layers in range(1, 4):
        load_layers(scene, num_layers, 10.0)
        names = [f"s-{num_layers}-{number}" for number in range(PolicyConfig.max_open_per_instance + 1)]
        for name in names:
            scene.admit(MODEL, name, num_prompt_tokens=10)
        told_s.append(next(refusal.retry_after_s for refusal in map(scene.refusal, names) if refusal is not None))
    assert all(abs(told - left_s) < 3.0 for told, left_s in zip(told_s, (30.0, 20.0, 10.0), strict=True))
