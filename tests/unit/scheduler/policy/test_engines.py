"""Workers with other engines than Torchrelay's. If an engine hands no KV over, as vLLM's does not, an instance plays
both roles, and pairs with itself alone. A model that names an engine is loaded only where it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.scheduler.policy.dispatch.test_placement import MODEL, NOW, a_candidate, place_at, placed
from tests.unit.scheduler.policy.dispatch.test_placement import an_admission as a_placeable
from tests.unit.scheduler.policy.paper_cluster import (
    DECODE,
    PREFILL,
    PaperCluster,
    a_model,
    a_pair,
    a_store,
    a_worker,
    one_host,
)
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.dispatch import endpoints
from torchrelay.scheduler.policy.dispatch.placement import NoPlacement
from torchrelay.scheduler.policy.types import BOTH, InstancePhase, WorkerStatus


def without_handover(worker: WorkerStatus) -> WorkerStatus:
    return replace(worker, engine="vllm", hands_over=False, computes_by_layer=False)


def test_workers_set_apart_play_both_roles_without_handover() -> None:
    scene = one_host(*map(without_handover, a_pair("w-a", "w-b")))
    placement = scene.serve(MODEL, "r1")
    assert not placement.needs_kv_transfer
    (load,) = scene.loads()
    assert [order.roles for hop in load.hops for order in hop.loads] == [BOTH]
    scene.check()


def test_a_load_of_an_engine_without_layer_spans_counts_no_layers() -> None:
    scene = one_host(without_handover(a_worker("w-a")))
    scene.admit(MODEL, "r1")
    scene.pass_time(1.0)
    scene.set_slot("w-a", num_layers_ready=2)
    scene.pass_time(1.0)
    (instance,) = endpoints.of_version(scene.policy.state, MODEL, scene.now).prefills
    assert instance.phase is InstancePhase.LOADING and instance.loaded_at > scene.now
    assert (instance.share_loaded_at(scene.now), instance.num_layer_steps) == (0.0, 1)


def test_a_load_whose_engine_starts_after_the_last_layer_is_not_stalled() -> None:
    scene = one_host(without_handover(a_worker("w-a")), slot_setup_s=30.0, load_stall_s=15.0)
    scene.admit(MODEL, "r1")
    scene.hold("store-1", MODEL)
    scene.set_slot("w-a", num_layers_ready=2, num_layers=2, loaded_share=1.0)
    scene.pass_time(1.0)
    (instance,) = endpoints.of_version(scene.policy.state, MODEL, scene.now).prefills
    assert 28.0 < instance.load_left_s(scene.now) < 31.0
    scene.pass_time(60.0, step_s=0.5)
    assert not scene.unloads()
    scene.finish_loads()
    assert scene.placement("r1") is not None


def test_placement_without_handover_stays_on_an_instance_with_enough_kv() -> None:
    full = a_candidate("full", BOTH, free=0, hands_over=False)
    busy = a_candidate("busy", BOTH, queued=300, hands_over=False)
    assert placed(full, busy) == ("busy", "busy")


def test_placement_pairs_only_engines_that_hand_over() -> None:
    prefill, decode = a_candidate("p", PREFILL, queued=400), a_candidate("d", DECODE)
    idle = a_candidate("whole", BOTH, hands_over=False)
    assert placed(prefill, decode, idle) == ("whole", "whole")
    crowded = a_candidate("whole", BOTH, num_decoding=400, step_s=0.5, hands_over=False)
    assert placed(prefill, decode, crowded) == ("p", "d")


def test_no_placement_on_a_prefill_and_a_decode_instance_without_handover() -> None:
    candidates = [a_candidate("p", PREFILL), a_candidate("w", BOTH, queued=600, hands_over=False)]
    answer = place_at(a_placeable(MODEL, "r1"), *candidates)
    assert isinstance(answer, NoPlacement) and answer.due > NOW
    assert answer.reason == "no instance with KV for the answer can compute the prompt or get its KV"


def running(scene: PaperCluster, request_id: str) -> str:
    """The worker that computes the request."""
    scene.pass_time(1.0)
    scene.finish_loads()
    scene.pass_time(0.2)
    scene.check()
    return scene.placed(request_id).decode.worker_id


def test_a_model_takes_any_engine_where_its_favourite_is_busy() -> None:
    scene = one_host("w-b", without_handover(a_worker("w-a")))  # vLLM's comes first by its name
    scene.admit(a_model(engine="torchrelay"), "r1")
    scene.admit(a_model("acme/other"), "r2")
    assert running(scene, "r2") == "w-a"


def test_a_slot_with_another_engine_is_not_taken_from_its_model() -> None:
    scene = one_host("w-b", "w-c")
    scene.serve(a_model(), "r1")
    scene.release("r1")
    scene.admit(a_model("acme/other", engine="vllm"), "r2")
    scene.pass_time(3.0)
    assert "evict" not in scene.kinds() and scene.placement("r2") is None


def test_an_adapter_gets_an_instance_on_its_engine_while_its_base_runs_on_another() -> None:
    """It was placed on the base's instance, and its worker refused it."""
    scene = one_host(without_handover(a_worker("w-a")))
    base = a_model("acme/base")
    scene.serve(base, "r1")
    scene.settle(a_worker("w-b", "host-1"))
    scene.admit(replace(base, name="acme/adapter", engine="torchrelay"), "r2")
    assert running(scene, "r2") == "w-b"
    assert scene.placed("r1").decode.worker_id == "w-a" and scene.refusal("r1") is None
    scene.release("r1")
    scene.admit(base, "r3")
    assert running(scene, "r3") == "w-b"


@pytest.mark.parametrize(
    ("changes", "worker_id"), [({}, "w-b"), ({"engine": "vllm"}, "w-c"), ({"engine": "vllm", "num_devices": 2}, "w-a")]
)
def test_a_model_is_loaded_into_a_slot_of_its_devices(changes: dict[str, Any], worker_id: str) -> None:
    pair, single = without_handover(a_worker("w-a", num_devices=2)), without_handover(a_worker("w-c"))
    scene = one_host(pair, "w-b", single)
    scene.admit(a_model(**changes), "r1")
    assert running(scene, "r1") == worker_id


def test_calls_leave_instances_with_fewer_devices_than_their_model_needs_now() -> None:
    """Calls went on to the instances of one device after a change of ``vllm`` to ``vllm:2``."""
    single, pair = without_handover(a_worker("w-a")), without_handover(a_worker("w-b", num_devices=2))
    scene = one_host(single, pair)
    scene.admit(a_model(engine="vllm"), "r1")
    assert running(scene, "r1") == "w-a"
    scene.admit(a_model(engine="vllm", num_devices=2), "r2")
    assert running(scene, "r2") == "w-b" and scene.refusal("r1") is None
    (event,) = scene.told("drain")
    assert event.reason == "it runs with vllm on 1 device, and its model needs vllm on 2 devices now"


def test_calls_leave_another_engine_once_a_worker_with_theirs_appears() -> None:
    """They stayed, because no worker had the engine at the change."""
    scene = one_host("w-b")
    scene.admit(a_model(), "r1")
    assert running(scene, "r1") == "w-b"
    scene.admit(a_model(engine="vllm"), "r2")
    assert running(scene, "r2") == "w-b" and "drain" not in scene.kinds()
    scene.workers["w-a"] = without_handover(a_worker("w-a"))
    scene.report("w-a")
    assert "drain" in scene.kinds(), "before the next call"
    scene.admit(a_model(engine="vllm"), "r3")
    assert running(scene, "r3") == "w-a"


@pytest.mark.parametrize("late", ["w-a", "w-b"])
def test_calls_leave_another_engine_after_a_restart_of_the_scheduler(late: str) -> None:
    """The new scheduler saw no change of the model, and took over its instances on other engines."""
    scene = one_host("w-b")
    scene.admit(a_model(), "r1")
    assert running(scene, "r1") == "w-b"
    again = PaperCluster(PolicyConfig())
    worker = scene.workers["w-b"]
    worker = replace(worker, slot=replace(worker.slot, instance_id="from before"))
    peers = {"w-b": worker, "w-a": without_handover(a_worker("w-a"))}
    last = peers.pop(late)
    again.settle(a_store("store-1", "host-1"), *peers.values())
    again.admit(a_model(engine="vllm"), "r2")
    again.settle(last)
    again.admit(a_model(engine="vllm"), "r3")
    assert running(again, "r3") == "w-a"
    assert all(instance.worker_id == "w-a" for instance in again.policy.state.instances)
    again.check()


def test_a_model_that_takes_any_slot_keeps_its_instances() -> None:
    scene = one_host(without_handover(a_worker("w-a", num_devices=2)), "w-b")
    scene.admit(a_model(engine="vllm", num_devices=2), "r1")
    assert running(scene, "r1") == "w-a"
    scene.admit(a_model(), "r2")
    scene.settle(a_worker("w-c"))
    assert scene.placement("r2") is not None and "drain" not in scene.kinds()
