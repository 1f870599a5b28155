"""Prompts that have not begun leave loading instances and leaving workers, once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.scheduler.policy.paper_cluster import PaperCluster, a_model, a_store, a_worker
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.effects import Recall
from torchrelay.scheduler.policy.inputs import FirstToken, Release
from torchrelay.scheduler.policy.types import BOTH, AttemptKey, InstancePhase, SlotStatus

MODEL = a_model()


def ready(worker_id: str, host_id: str) -> SlotStatus:
    return SlotStatus(InstancePhase.READY, f"i of {worker_id}", MODEL.name, MODEL.version_id, MODEL.pack_id, BOTH, 4, 4)


def a_loading_instance(**config: object) -> PaperCluster:
    """With three prompts of 100 tokens dispatched to it; predicted to load for another 12 s."""
    scene = PaperCluster(PolicyConfig(max_instances=1, relay_bytes_per_s=2e6, **config))  # type: ignore[arg-type]
    scene.settle(a_store("s1", "host-1"), a_store("s2", "host-2"), a_worker("w1", "host-1"))
    for number in range(3):
        scene.admit(MODEL, f"r{number}")
    scene.pass_time(4.0)
    return scene


def a_newcomer_is_ready(scene: PaperCluster) -> None:
    scene.workers["w2"] = a_worker("w2", "host-2", slot=ready("w2", "host-2"))
    scene.report("w2")


def recalled(scene: PaperCluster) -> list[AttemptKey]:
    return [answer.key for answer in scene.answers if isinstance(answer, Recall)]


def ask_again(scene: PaperCluster, keys: list[AttemptKey]) -> None:
    for key in keys:
        scene.apply(Release(key, delivered=False, is_recalled=True))
        scene.admit(MODEL, key.request_id, attempt=key.attempt + 1)


def test_prompts_on_loading_instance_go_to_ready_one() -> None:
    scene = a_loading_instance()
    a_newcomer_is_ready(scene)
    keys = recalled(scene)
    assert sorted(keys) == [AttemptKey(f"r{number}", 1) for number in range(3)]
    assert all(answer.keeps_prompt for answer in scene.answers if isinstance(answer, Recall))
    ask_again(scene, keys)
    placements = [scene.placement(f"r{number}", attempt=2) for number in range(3)]
    assert [placement and placement.prefill.worker_id for placement in placements] == ["w2"] * 3
    sources = [placement and placement.prompt_source for placement in placements]
    assert [source and (source.key.attempt, source.worker.worker_id) for source in sources] == [(1, "w1")] * 3
    told = [event.reason for event in scene.told("recall")]
    assert told == [
        f"w1 loads for 12.8 s more, w2 computes the other layers of attempt {number}" for number in (1, 1, 1)
    ]
    scene.check()


def test_prompt_is_recalled_once() -> None:
    scene = a_loading_instance()
    a_newcomer_is_ready(scene)
    keys = recalled(scene)
    ask_again(scene, keys)
    scene.pass_time(3.0)
    assert recalled(scene) == keys, "they have not begun on the newcomer either, and were taken back once"


def test_prompt_that_begins_meanwhile_stays() -> None:
    scene = a_loading_instance()
    a_newcomer_is_ready(scene)
    keys = recalled(scene)
    scene.apply(FirstToken(keys[0]))
    scene.pass_time(2.0)
    assert len(recalled(scene)) == 3
    attempt = scene.policy.state.attempts.get(keys[0])
    assert attempt is not None and attempt.is_computed


def test_recalled_request_keeps_arrival_and_is_not_refused() -> None:
    scene = a_loading_instance(queue_limit=1)
    a_newcomer_is_ready(scene)
    first = recalled(scene)[0]
    arrived_at = scene.policy.state.attempts.get(first)
    assert arrived_at is not None
    del scene.workers["w2"]
    scene.pass_time(4.0)  # and the newcomer is lost again
    scene.workers["w1"] = replace(scene.workers["w1"], kv_pool_bytes=1)
    scene.report("w1")
    scene.admit(MODEL, "waits", ttft_target_s=1000.0)
    assert scene.placement("waits") is None
    scene.apply(Release(first, delivered=False, is_recalled=True))
    scene.admit(MODEL, first.request_id, attempt=2)
    assert scene.refusal(first.request_id, attempt=2) is None
    again = next(admission for admission in scene.policy.state.queues if admission.key.request_id == first.request_id)
    assert again.admitted_at == arrived_at.admission.admitted_at
    source = again.prompt_source
    assert again.was_recalled and source and (source.key, source.worker) == (first, arrived_at.placement.prefill)
    scene.admit(MODEL, "newcomer")
    assert scene.refusal("newcomer") is not None and scene.refusal(first.request_id, attempt=2) is None
    assert not scene.policy.state.membership.suspects, "its workers have not failed it"


def test_recalled_prompt_that_returns_to_its_worker_has_no_source() -> None:
    scene = a_loading_instance()
    a_newcomer_is_ready(scene)
    keys = recalled(scene)
    del scene.workers["w2"]
    scene.pass_time(4.0)
    ask_again(scene, keys[:1])
    placement = scene.placed(keys[0].request_id, attempt=2)
    assert placement.prefill.worker_id == "w1" and placement.prompt_source is None


@pytest.mark.parametrize("is_lost", [True, False])
def test_prompt_of_lost_or_suspected_worker_has_no_source(is_lost: bool) -> None:
    scene = a_loading_instance()
    a_newcomer_is_ready(scene)
    key = recalled(scene)[0]
    if is_lost:
        del scene.workers["w1"]
        scene.pass_time(4.0)
    else:
        scene.policy.state.membership.suspect("w1", scene.now)
    ask_again(scene, [key])
    placement = scene.placed(key.request_id, attempt=2)
    assert placement.prefill.worker_id == "w2" and placement.prompt_source is None


def leave(scene: PaperCluster, worker_id: str) -> None:
    scene.workers[worker_id] = replace(scene.workers[worker_id], is_leaving=True)
    scene.report(worker_id)


def test_prompts_on_leaving_worker_wait_for_another() -> None:
    scene = a_loading_instance()
    scene.workers["w2"] = a_worker("w2", "host-2")
    scene.report("w2")
    assert recalled(scene) == []
    leave(scene, "w1")
    keys = recalled(scene)
    assert sorted(keys) == [AttemptKey("r1", 1), AttemptKey("r2", 1)], "the first has begun"
    told = [event.reason for event in scene.told("recall")]
    assert told[0] == "attempt 1 has not begun, and w1 leaves"
    ask_again(scene, keys)
    placements = [scene.placement(key.request_id, attempt=2) for key in keys]
    assert [placement and placement.prefill.worker_id for placement in placements] == ["w2"] * 2
