"""Running answers leave instances that drain, and those whose tokens take too long; once, and only for a gain."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from msgspec import structs

from tests.unit.scheduler.policy.paper_cluster import MB, PaperCluster, a_model, a_store, a_worker
from torchrelay.common.latency.latency_model import LatencyModel, StepCost
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.core import (
    BOTH,
    AttemptKey,
    InstancePhase,
    LatencyTargets,
    Placement,
    Role,
    SlotStatus,
    WorkerStatus,
)
from torchrelay.scheduler.policy.effects import Migrate, Recall, RefusalReason
from torchrelay.scheduler.policy.inputs import FirstToken, GatewayConnected, Release
from torchrelay.scheduler.policy.prediction import Outcome

MODEL = a_model()
# A step of one takes 30 ms, of eleven 130 ms; 10,000 prompt tokens take a second.
LATENCY = LatencyModel(StepCost(0.0, 1e-4, 0.0, 100), StepCost(0.02, 0.01, 0.0, 100), 2048)


def ready(worker_id: str) -> WorkerStatus:
    instance_id = f"i of {worker_id}"
    slot = SlotStatus(InstancePhase.READY, instance_id, MODEL.name, MODEL.version_id, MODEL.pack_id, BOTH, 4, 4)
    return a_worker(worker_id, slot=slot, latency=LATENCY)


def a_cluster(*worker_ids: str, **config: object) -> PaperCluster:
    scene = PaperCluster(PolicyConfig(**config))  # type: ignore[arg-type]
    return scene.settle(a_store("s1", "host-1"), *map(ready, worker_ids))


def begin(scene: PaperCluster, request_id: str, attempt: int = 1, **changes: object) -> Placement:
    """It is placed, and has its first token."""
    scene.admit(MODEL, request_id, attempt, **{"max_tokens": 1000, **changes})  # type: ignore[arg-type]
    placement = scene.placement(request_id, attempt)
    assert placement is not None
    scene.apply(FirstToken(placement.key))
    return placement


def drain(scene: PaperCluster, worker_id: str) -> None:
    scene.set_slot(worker_id, phase=InstancePhase.DRAINING)
    scene.report(worker_id)


def told(scene: PaperCluster) -> list[AttemptKey]:
    return [answer.key for answer in scene.answers if isinstance(answer, Migrate)]


def go_on(scene: PaperCluster, key: AttemptKey, **changes: object) -> Placement | None:
    """As the gateway does: another attempt, and the end of this one when that is placed."""
    successor = key._replace(attempt=key.attempt + 1)
    scene.admit(MODEL, *successor, migrates=key.attempt, **{"num_forced_tokens": 20, "max_tokens": 1000, **changes})  # type: ignore[arg-type]
    placement = scene.placement(*successor)
    if placement is not None:
        scene.apply(Release(key, delivered=True, is_migrated=True))
    return placement


def test_answers_leave_draining_instance_once() -> None:
    scene = a_cluster("w1", "w2", "w3")
    where = {name: begin(scene, name).decode.worker_id for name in ("r1", "r2", "r3")}
    assert sorted(where.values()) == ["w1", "w2", "w3"]
    drain(scene, "w1")
    scene.pass_time(0.6)
    (key,) = told(scene)
    assert where[key.request_id] == "w1"
    placement = go_on(scene, key)
    assert placement is not None and placement.decode.worker_id in ("w2", "w3")
    assert scene.policy.state.attempts.at("i of w1").is_idle
    (reason,) = [event.reason for event in scene.events if event.kind == "migrate"]
    assert "w1 is draining and would take another" in reason
    scene.apply(FirstToken(placement.key))
    drain(scene, placement.decode.worker_id)
    scene.pass_time(3.0)
    others = [key.request_id for key in told(scene)[1:]]
    assert key.request_id not in others, "it has moved before"
    scene.check()


def test_gateway_is_not_asked_again_before_timeout() -> None:
    scene = a_cluster("w1", "w2")
    key = begin(scene, "r1").key
    drain(scene, "w1")
    scene.pass_time(1.9)
    assert told(scene) == [key]
    scene.pass_time(2.0)
    assert told(scene) == [key, key], "the word may have been lost with its stream"


@pytest.mark.parametrize(
    "why",
    ["no gain", "it ends soon", "not begun", "several choices", "no other", "no KV", "slower there", "prompts wait"],
)
def test_answer_stays_without_gain_or_free_instance(why: str) -> None:
    scene = a_cluster("w1", "w2", migration_gain_s=math.inf if why == "no gain" else 0.5)
    if why == "slower there":
        slow = replace(LATENCY, decode=StepCost(0.2, 0.01, 0.0, 100))
        scene.workers["w2"] = replace(scene.workers["w2"], latency=slow)
        scene.report_all()
    if why == "not begun":
        scene.admit(MODEL, "r1", max_tokens=1000)
    else:
        begin(
            scene,
            "r1",
            num_choices=2 if why == "several choices" else 1,
            max_tokens=20 if why == "it ends soon" else 1000,
        )
    first = scene.placement("r1")
    assert first is not None and first.decode.worker_id == "w1"
    if why == "no other":
        scene.kill("w2")
    elif why == "no KV":
        scene.workers["w2"] = replace(scene.workers["w2"], kv_pool_bytes=MB)
        scene.report("w2")
    elif why == "prompts wait":
        scene.admit(MODEL, "too large", num_prompt_tokens=63 * 1024, max_tokens=10)
        scene.admit(MODEL, "too large as well", num_prompt_tokens=63 * 1024, max_tokens=10)
        assert scene.policy.state.queues.num_waiting(MODEL.version_id)
    drain(scene, "w1")
    scene.pass_time(2.0)
    assert told(scene) == []


def test_move_without_place_is_refused_and_answer_continues() -> None:
    scene = a_cluster("w1", "w2")
    key = begin(scene, "r1").key
    drain(scene, "w1")
    scene.pass_time(0.6)
    assert told(scene) == [key]
    enough, scene.workers["w2"] = scene.workers["w2"], replace(scene.workers["w2"], kv_pool_bytes=MB)
    scene.report("w2")
    assert go_on(scene, key) is None
    refusal = scene.refusal("r1", attempt=2)
    assert refusal is not None and refusal.reason is RefusalReason.NOT_MIGRATED
    state = scene.policy.state
    assert state.attempts.get(key) is not None and not len(state.queues)
    assert [event.kind for event in scene.events if event.kind in ("refuse", "wake")] == []
    scene.workers["w2"] = enough
    scene.pass_time(0.6)
    assert told(scene) == [key, key]
    scene.check()


def test_move_of_ended_attempt_is_refused() -> None:
    scene = a_cluster("w1", "w2")
    key = begin(scene, "r1").key
    scene.release("r1")
    assert go_on(scene, key) is None and scene.refusal("r1", attempt=2) is not None


def test_placement_lost_with_stream_is_sent_again() -> None:
    scene = a_cluster("w1", "w2")
    key = begin(scene, "r1").key
    drain(scene, "w1")
    scene.admit(MODEL, "r1", 2, migrates=1, num_forced_tokens=20, max_tokens=1000)
    first = scene.placement("r1", attempt=2)
    scene.apply(GatewayConnected("gateway-1"))
    scene.answers.clear()
    scene.admit(MODEL, "r1", current=scene.placement("r1"), max_tokens=1000)
    scene.admit(MODEL, "r1", 2, migrates=1, num_forced_tokens=20, max_tokens=1000)
    assert first is not None and scene.placement("r1", attempt=2) == first
    scene.apply(Release(key, delivered=True, is_migrated=True))
    scene.pass_time(scene.config.gateway_grace_s + 1.0)
    assert len(scene.policy.state.attempts) == 1
    scene.check()


def test_new_scheduler_adopts_attempt_and_places_its_successor() -> None:
    before = a_cluster("w1", "w2")
    running = begin(before, "r1")
    scene = a_cluster("w1", "w2")
    scene.admit(MODEL, "r1", current=running, max_tokens=1000)
    scene.admit(MODEL, "r1", 2, migrates=1, num_forced_tokens=20, max_tokens=1000)
    second = scene.placement("r1", attempt=2)
    assert second is not None and second.decode.worker_id != running.decode.worker_id


def test_answer_moves_to_instance_that_meets_target() -> None:
    """With fourteen answers on an instance each token takes 160 ms; then an empty second instance comes."""
    scene = a_cluster("w1")
    keys = [begin(scene, f"r{number}").key for number in range(14)]
    scene.pass_time(1.0)
    assert told(scene) == []
    scene.settle(ready("w2"))
    assert len(told(scene)) >= 1
    while (key := told(scene)[-1]) in keys:
        keys.remove(key)
        placement = go_on(scene, key)
        assert placement is not None and placement.decode.worker_id == "w2"
        scene.apply(FirstToken(placement.key))
        scene.pass_time(1.1)
    assert 7 <= len(keys) <= 11, "from then on the target is met"
    reasons = [event.reason for event in scene.events if event.kind == "migrate"]
    assert all(" on w1, " in reason and reason.endswith(" there") for reason in reasons)
    scene.check()


def test_answers_leave_instance_that_gave_up_decode_if_tokens_take_too_long() -> None:
    """It is not a decode instance any more, and its fourteen answers go on there."""
    scene = a_cluster("w1")
    keys = [begin(scene, f"r{number}").key for number in range(14)]
    scene.settle(ready("w2"))
    before = len(told(scene))
    scene.set_slot("w1", roles=frozenset((Role.PREFILL,)))
    scene.pass_time(3.0)
    assert before < len(told(scene)) <= len(keys)
    key = next(key for key in told(scene) if key in keys)
    placement = go_on(scene, key)
    assert placement is not None and placement.decode.worker_id == "w2"


def test_migration_uses_tbt_target_of_model() -> None:
    """With seven answers on an instance each token takes 90 ms."""

    def moves(target_s: float) -> bool:
        scene = a_cluster("w1")
        model = replace(MODEL, targets=LatencyTargets(tbt_target_s=target_s))
        for number in range(7):
            scene.admit(model, f"r{number}", max_tokens=1000)
            scene.apply(FirstToken(AttemptKey(f"r{number}", 1)))
        scene.settle(ready("w2"))
        return bool(told(scene))

    assert [moves(target_s) for target_s in (0.0, 0.05)] == [False, True]


@pytest.mark.parametrize("max_tokens", [5, 1000])
def test_answer_that_ends_soon_stays(max_tokens: int) -> None:
    scene = a_cluster("w1")
    for number in range(10):
        begin(scene, f"r{number}", max_tokens=max_tokens)
    assert max(placed.placement.predicted.tbt_s for placed in scene.opened) > scene.config.tbt_target_s
    scene.settle(ready("w2"))
    scene.pass_time(1.0)
    assert bool(told(scene)) == (max_tokens == 1000)


def test_answers_stay_if_all_instances_are_slow() -> None:
    scene = a_cluster("w1", "w2")
    for number in range(22):
        begin(scene, f"r{number}")
    scene.pass_time(2.0)
    assert told(scene) == []


def test_length_of_migrated_answer_is_learned_once() -> None:
    scene = a_cluster("w1", "w2", "w3")
    for number in range(8):
        key = begin(scene, f"r{number}").key
        scene.admit(MODEL, *key._replace(attempt=2), migrates=1, num_forced_tokens=60, max_tokens=1000)
        scene.apply(Release(key, True, Outcome(num_output_tokens=60), is_migrated=True))
        scene.apply(Release(key._replace(attempt=2), True, Outcome(num_output_tokens=40)))
    assert scene.policy.state.answer_lengths.expected(MODEL.version_id, 1000) == 100


def test_prompt_of_migrating_answer_is_not_recalled() -> None:
    """Its client waits for the next token: it would have to wait in the queue."""
    scene = a_cluster("w1", "w2")
    key = begin(scene, "r1").key
    drain(scene, "w1")
    scene.pass_time(0.6)
    ahead = scene.admit(MODEL, "ahead").key
    assert go_on(scene, key) is not None
    scene.settle(ready("w3"))
    scene.pass_time(3.0)
    back = [answer.key for answer in scene.answers if isinstance(answer, Recall)]
    assert AttemptKey("r1", 2) not in back and scene.policy.state.attempts.get(ahead) is not None


def test_draining_decode_instance_is_emptied_by_prefill() -> None:
    scene = PaperCluster(PolicyConfig()).settle(a_store("s1", "host-1"))
    for name, role in (("p", Role.PREFILL), ("d1", Role.DECODE), ("d2", Role.DECODE)):
        worker = ready(name)
        slot = replace(worker.slot, roles=frozenset((role,)))
        scene.settle(replace(worker, slot=slot))
    running = begin(scene, "r1")
    drain(scene, running.decode.worker_id)
    scene.pass_time(0.6)
    placement = go_on(scene, running.key)
    assert placement is not None and placement.prefill.worker_id == "p"
    assert {placement.decode.worker_id, running.decode.worker_id} == {"d1", "d2"}


def test_migrated_answers_do_not_block_others() -> None:
    scene = a_cluster("w1")
    for number in range(6):
        begin(scene, f"moved {number}", 2, current=None, num_forced_tokens=1)
    for attempt in scene.policy.state.attempts.attempts():
        attempt.admission = structs.replace(attempt.admission, migrates=1)
    for number in range(8):
        begin(scene, f"r{number}", max_tokens=900)
    scene.settle(ready("w2"))
    assert [key.request_id[0] for key in told(scene)[:1]] == ["r"]


def test_migrations_are_limited_to_one_step_of_prompts() -> None:
    """Their prompts take 150 ms each, a full step 205 ms."""
    scene = a_cluster("w1")
    for number in range(6):
        begin(scene, f"r{number}", num_prompt_tokens=1500, tbt_target_s=1.0)
    scene.settle(ready("w2"))
    drain(scene, "w1")
    scene.pass_time(0.5)  # one look at instances that drain
    assert len(told(scene)) == 2
    assert [go_on(scene, key, num_prompt_tokens=1500) is not None for key in told(scene)] == [True, True]
