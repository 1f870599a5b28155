"""Tenants that uploaded identical files: one version, and none learns about the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.scheduler.policy.paper_cluster import (
    PaperCluster,
    a_model,
    a_worker,
    hosts,
    one_host,
    two_workers_one_host,
)
from torchrelay.scheduler.policy.cluster.version_aliases import VersionAliases
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.effects import RefusalReason, SchedulerEvent
from torchrelay.scheduler.policy.explain import ExplainLog
from torchrelay.scheduler.policy.inputs import MinimumsSet, ModelDeleted
from torchrelay.scheduler.policy.types import MAX_VERSIONS, InstancePhase, LatencyTargets, SlotClass

ACME = a_model("acme/tiny", idle_timeout_s=1.0)
BIRCH = replace(ACME, name="birch/words")


def explained(events: list[SchedulerEvent]) -> ExplainLog:
    explain = ExplainLog()
    for happening in events:
        explain.note(happening)
    return explain


def test_both_read_of_their_own_model_and_of_no_other() -> None:
    scene = two_workers_one_host()
    scene.serve(ACME, "r1")
    scene.admit(BIRCH, "r2")
    assert len(scene.loads()) == 1 and scene.placement("r2") is not None
    for request_id in ("r1", "r2"):
        scene.release(request_id)
    scene.pass_time(2.0)
    explain = explained(scene.events)
    for model in (ACME, BIRCH):
        decisions = explain.model(model.name)
        assert {"drain", "idle", "released"} <= {event.kind for event in decisions}
        told = "".join(event.model + event.subject + event.reason for event in decisions)
        other = BIRCH if model is ACME else ACME
        assert other.name not in told
    assert [event.topic for event in scene.events].count("instance.released") == 2  # once each for the operator


def test_refusals_name_the_model_that_was_called() -> None:
    scene = two_workers_one_host(load_tries=1)
    scene.failing_workers = {"w-a", "w-b"}
    scene.admit(ACME, "r1")
    scene.pass_time(10.0)
    scene.admit(BIRCH, "r2")
    scene.pass_time(10.0)
    for request_id, own in (("r1", ACME), ("r2", BIRCH)):
        refusal = scene.refused(request_id)
        assert refusal.reason is RefusalReason.LOAD_FAILED
        assert refusal.message.startswith(f"{own.name} could not be loaded")


def test_timeline_uses_model_name_of_request() -> None:
    scene = two_workers_one_host()
    scene.failing_workers = {"w-a", "w-b"}
    scene.admit(ACME, "r1")
    scene.admit(BIRCH, "r2")  # named last, while both wait
    scene.failing_workers = set()
    scene.pass_time(10.0)
    assert {placed.key.request_id: placed.model for placed in scene.opened} == {"r1": ACME.name, "r2": BIRCH.name}


def test_tenant_reads_number_of_own_waiting_requests() -> None:
    scene = one_host()
    for number in range(3):
        scene.admit(ACME, f"a{number}")
    scene.admit(BIRCH, "b0")
    scene.settle(a_worker("w-a"))
    woken = scene.told(topic="scale.up")[0]
    assert (woken.reason, woken.fields["num_waiting"]) == ("at zero, 4 waiting", 4)  # for the operator
    explain = explained(scene.events)
    for model, told in ((ACME, "at zero, 3 waiting"), (BIRCH, "at zero, 1 waiting")):
        assert {event.reason for event in explain.model(model.name) if event.kind in ("load", "scale_up")} == {told}


def test_full_queue_message_counts_own_requests() -> None:
    scene = PaperCluster(PolicyConfig(queue_limit=3)).settle()
    for request_id in ("a0", "a1"):
        scene.admit(ACME, request_id)
    for request_id in ("b0", "b1"):
        scene.admit(BIRCH, request_id)
    scene.admit(ACME, "a2")
    for request_id, told in (
        ("a2", "acme/tiny is full (your waiting requests: 2)"),
        ("b1", "words is full (your waiting requests: 1)"),
    ):
        refusal = scene.refused(request_id)
        assert refusal.reason is RefusalReason.QUEUE_FULL and told in refusal.message


def test_answer_that_goes_on_is_never_refused_as_too_many() -> None:
    """Somebody reads it; it asks for its next tokens like a new request."""
    scene = PaperCluster(PolicyConfig(queue_limit=2, queue_limit_total=3)).settle()
    for request_id in ("a0", "a1"):
        scene.admit(ACME, request_id)
    scene.admit(ACME, "a2", attempt=2, num_forced_tokens=512)
    scene.admit(ACME, "a3", attempt=2, num_forced_tokens=512)
    assert scene.refusal("a2", attempt=2) is None and scene.refusal("a3", attempt=2) is None
    assert len(scene.policy.state.queues) == 4
    scene.admit(ACME, "a4")
    assert scene.refused("a4").reason is RefusalReason.QUEUE_FULL


def is_at_zero(scene: PaperCluster) -> bool:
    return all(worker.slot.phase is InstancePhase.FREE for worker in scene.workers.values())


def test_unused_model_timeout_does_not_count() -> None:
    scene = two_workers_one_host()
    often = replace(ACME, idle_timeout_s=5.0)
    scene.admit(replace(BIRCH, idle_timeout_s=20.0), "once")
    scene.finish_loads()
    scene.release("once")
    for number in range(6):
        scene.admit(often, f"r{number}")
        scene.pass_time(4.0)
        scene.release(f"r{number}")
    scene.pass_time(4.5)
    assert not is_at_zero(scene)
    scene.pass_time(1.0)
    assert is_at_zero(scene)


def test_instance_limit_does_not_bind_other_tenant() -> None:
    """S6: the last to call set it for all."""
    scene = hosts(3)
    scene.admit(replace(ACME, max_instances=3), "a")
    scene.finish_loads()
    for number in range(60):
        scene.admit(replace(BIRCH, max_instances=1), f"b{number}", num_prompt_tokens=4000)
    scene.pass_time(2.0)
    assert len({instance.host_id for instance in scene.policy.state.instances}) == 3


def test_shortest_tbt_target_counts_for_shared_instances() -> None:
    state, quick = hosts(1).policy.state, LatencyTargets(tbt_target_s=0.05)
    state.note_model(replace(ACME, targets=LatencyTargets(tbt_target_s=0.5)), 10.0)
    assert state.tbt_target_s(ACME.version_id, 10.0) == 0.5
    state.note_model(replace(BIRCH, targets=quick, idle_timeout_s=5.0), 10.0)
    state.note_model(replace(ACME, targets=LatencyTargets(tbt_target_s=0.5)), 11.0)
    assert state.tbt_target_s(ACME.version_id, 11.5) == 0.05, "both are in use"
    assert state.tbt_target_s(ACME.version_id, 20.0) == 0.5, "the other is not in use any more"
    state.note_model(ACME, 21.0)
    assert state.tbt_target_s(ACME.version_id, 21.0) == state.tbt_target_s("unknown", 21.0) == 0.1, "the default"


def test_deleted_model_is_unnamed_and_leaves_others_running() -> None:
    scene = two_workers_one_host()
    scene.serve(ACME, "r1")
    scene.admit(BIRCH, "r2")
    aliases = scene.policy.state.versions.of(ACME.version_id).aliases
    assert scene.policy.state.names_of(ACME.version_id) == (ACME.name, BIRCH.name)
    scene.apply(ModelDeleted(BIRCH.name))
    assert scene.policy.state.names_of(ACME.version_id) == (ACME.name,)
    assert aliases.idle_timeout_s(scene.now + 100.0)[0] == 1.0
    scene.apply(ModelDeleted(ACME.name))
    scene.apply(ModelDeleted("acme/unknown"))
    assert scene.policy.state.names_of(ACME.version_id) == ()
    scene.pass_time(2.0)
    assert not is_at_zero(scene), "its requests run on"
    for request_id in ("r1", "r2"):
        assert scene.placement(request_id) is not None
        scene.release(request_id)
    scene.pass_time(0.3)
    assert is_at_zero(scene)
    scene.check()


def test_idle_instances_of_deleted_model_are_drained() -> None:
    """They stayed for the default timeout, whatever the model's own was."""
    scene = two_workers_one_host()
    scene.admit(replace(ACME, idle_timeout_s=5.0), "r1")
    scene.finish_loads()
    scene.release("r1")
    scene.pass_time(1.0)
    assert not is_at_zero(scene)
    scene.apply(ModelDeleted(ACME.name))
    assert scene.policy.state.versions.of(ACME.version_id).aliases.idle_timeout_s(scene.now)[0] == 5.0
    scene.pass_time(0.3)
    assert is_at_zero(scene)
    drained = [event.reason for event in scene.told("idle")]
    assert drained and all("its model is deleted" in reason for reason in drained)


def test_deleted_model_is_not_loaded_by_forecast() -> None:
    """It came every minute."""

    def wakes_after_its_last_request(*, is_deleted: bool) -> int:
        scene = two_workers_one_host(idle_timeout_s=5.0)
        for number in range(12):
            scene.admit(replace(ACME, idle_timeout_s=0.0), f"r{number}")
            scene.finish_loads()
            scene.pass_time(1.0, step_s=1.0)
            scene.release(f"r{number}")
            scene.pass_time(40.0 if number == 11 else 60.0, step_s=1.0)
        num_wakes = len(scene.loads())
        if is_deleted:
            scene.apply(ModelDeleted(ACME.name))
        scene.pass_time(60.0, step_s=1.0)
        return len(scene.loads()) - num_wakes

    assert wakes_after_its_last_request(is_deleted=False) == 1
    assert wakes_after_its_last_request(is_deleted=True) == 0


def test_only_new_request_restores_deleted_model() -> None:
    """A recalled or resumed request restored it, and so did minimums that were read before: it was named for ever."""
    scene = two_workers_one_host()
    for request_id in ("r1", "r2"):
        scene.admit(ACME, request_id)
    scene.finish_loads()
    scene.apply(ModelDeleted(ACME.name))
    scene.release("r1")
    scene.admit(ACME, "r1", attempt=2)
    scene.admit(ACME, "r2", current=scene.placement("r2"))
    scene.apply(MinimumsSet((replace(ACME, min_instances=1),)))
    assert scene.policy.state.names_of(ACME.version_id) == ()
    assert scene.placement("r1", 2) is not None
    scene.apply(MinimumsSet(()))
    scene.release("r1", attempt=2)
    scene.release("r2")
    scene.pass_time(0.3)
    assert is_at_zero(scene) and scene.policy.state.names_of(ACME.version_id) == ()
    scene.admit(ACME, "r3")
    assert scene.policy.state.names_of(ACME.version_id) == (ACME.name,), "it was published anew"
    scene.finish_loads()
    scene.release("r3")
    scene.pass_time(0.5)
    assert not is_at_zero(scene), "its own timeout counts again"


def test_settings_of_deleted_model_do_not_bind_others() -> None:
    state = hosts(1).policy.state
    state.note_model(replace(BIRCH, idle_timeout_s=5.0), 10.0)
    state.note_model(replace(ACME, idle_timeout_s=20.0), 10.0)
    aliases = state.versions.of(ACME.version_id).aliases
    assert aliases.idle_timeout_s(11.0) == (20.0, False)
    assert aliases.delete(ACME.name) and not aliases.is_deleted
    state.note_model(replace(ACME, idle_timeout_s=20.0), 12.0, is_new_call=False)
    assert state.names_of(ACME.version_id) == (BIRCH.name,)
    assert [aliases.idle_timeout_s(now) for now in (12.0, 100.0)] == [(5.0, False)] * 2


def test_names_are_bounded() -> None:
    aliases = VersionAliases()
    for number in range(100):
        aliases.note(replace(ACME, version_id="v", name=f"tenant-{number:03}/m"), 60.0, 0.1, 0.0)
    assert len(aliases.names) == 64 and "tenant-099/m" in aliases.names


def test_versions_are_bounded() -> None:
    state = hosts(1).policy.state
    for number in range(MAX_VERSIONS + 100):
        state.note_model(replace(ACME, version_id=f"v{number}", pack_id=f"p{number}"), 0.0)
    assert len(list(state.versions)) == len(state.version_of_pack) == MAX_VERSIONS
    assert state.names_of("v0") == () and state.names_of(f"v{MAX_VERSIONS}") == (ACME.name,)


IN_A, IN_B = SlotClass(labels=frozenset(("zone=a",))), SlotClass(labels=frozenset(("gpu=l4",)))
IN_C = SlotClass(labels=frozenset(("zone=c", "gpu=l4")))
ANY, OWN, VLLM, PAIR = SlotClass(), SlotClass(1, "torchrelay"), SlotClass(1, "vllm"), SlotClass(2, "vllm")


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        ({"acme/m": VLLM}, VLLM),
        ({"acme/m": PAIR}, PAIR),
        ({"acme/m": ANY, "acme/adapter": OWN}, OWN),
        ({"acme/m": VLLM, "acme/n": OWN}, ANY),
        ({"acme/m": VLLM, "acme/n": PAIR}, VLLM),
        ({"acme/m": VLLM, "birch/m": PAIR}, VLLM),  # weights that only vLLM computes went to Torchrelay's own slots
        ({"acme/m": ANY, "acme/n": PAIR, "acme/o": VLLM}, VLLM),
        ({"acme/m": ANY, "birch/m": VLLM, "birch/n": PAIR}, ANY),
        ({"acme/m": PAIR, "birch/m": PAIR}, PAIR),
        ({"acme/m": ANY, "birch/m": PAIR}, ANY),
        ({"acme/m": PAIR, "acme/n": IN_A, "birch/m": IN_B}, SlotClass(labels=IN_A.labels | IN_B.labels)),
        ({"acme/m": VLLM, "acme/adapter": IN_A}, VLLM._replace(labels=IN_A.labels)),
        ({"acme/m": IN_A, "birch/m": IN_C}, IN_B),  # no host was in both zones, and neither was served
    ],
)
def test_slots_of_a_tenant_restrict_no_other_tenant(classes: dict[str, SlotClass], expected: SlotClass) -> None:
    aliases = VersionAliases()
    for name, (num_devices, engine, _, labels) in classes.items():
        model = replace(a_model(name), version_id="v", num_devices=num_devices, engine=engine, hosts=labels)
        aliases.note(model, 60.0, 0.1, now=1.0)
    assert aliases.slot_class(now=2.0) == expected


def test_limit_of_threads_does_not_slow_a_model_without() -> None:
    aliases = VersionAliases()
    assert aliases.threads(now=1.0) == 0
    for number, (name, threads, expected) in enumerate([("acme/m", 2, 2), ("birch/m", 4, 4), ("cedar/m", 0, 0)]):
        aliases.note(replace(a_model(name), version_id="v", threads=threads), 60.0, 0.1, now=float(number))
        assert aliases.threads(now=float(number)) == expected
