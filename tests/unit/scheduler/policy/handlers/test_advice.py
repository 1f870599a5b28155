"""A scheduler that advises: minimums are loaded, all other decisions are recorded and change nothing."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.scheduler.policy.paper_cluster import PaperCluster, a_model, a_store, a_worker
from torchrelay.scheduler.policy.config import PolicyConfig, ScalingMode
from torchrelay.scheduler.policy.effects import LoadCommand, RefusalReason, SchedulerEvent
from torchrelay.scheduler.policy.inputs import MinimumsSet

MODEL = a_model()
OTHER = a_model("acme/other", version_id="v-other", pack_id="p-other")


def a_cluster() -> PaperCluster:
    config = PolicyConfig(scaling=ScalingMode.ADVISE, idle_timeout_s=5.0)
    return PaperCluster(config).settle(a_store("s1", "host-1"), a_worker("w1", "host-1"), a_worker("w2", "host-1"))


def advice(scene: PaperCluster) -> list[SchedulerEvent]:
    return scene.told(topic="scale.advice")


def test_request_for_model_at_zero_is_refused_and_its_load_is_advised() -> None:
    scene = a_cluster()
    scene.admit(MODEL, "r1")
    scene.pass_time(12.0)
    assert not [command for command in scene.commands if isinstance(command, LoadCommand)]
    refusal = scene.refused("r1")
    assert refusal.reason is RefusalReason.LOAD_FAILED
    assert "the scheduler only advises" in refusal.message
    (advised,) = advice(scene)
    assert (advised.model, advised.reason) == (MODEL.name, "would load 1 instance: at zero, 1 waiting")
    assert advised.fields["cause"] == "at_zero" and advised.fields["num_waiting"] == 1
    assert not scene.policy.state.instances.of_version(MODEL.version_id)


def test_minimum_is_loaded_and_drain_is_advised() -> None:
    scene = a_cluster()
    for model in (replace(MODEL, min_instances=1), replace(MODEL, min_instances=0)):
        scene.models[model.version_id] = model
        scene.apply(MinimumsSet((model,) if model.min_instances else ()))
        scene.finish_loads()
        scene.pass_time_with_beats(20.0)
    (instance,) = scene.policy.state.instances.of_version(MODEL.version_id)
    assert not scene.unloads()
    advised = advice(scene)
    assert [event.subject for event in advised] == [instance.instance_id]
    assert advised[0].reason.startswith("would drain: idle for")
    scene.admit(MODEL, "r1")
    assert scene.placement("r1") is not None, "what is loaded serves"


def test_advice_that_stands_is_repeated_after_a_minute() -> None:
    scene = a_cluster()
    scene.models[MODEL.version_id] = kept = replace(MODEL, min_instances=1)
    scene.apply(MinimumsSet((kept,)))
    scene.finish_loads()
    scene.apply(MinimumsSet(()))
    scene.pass_time_with_beats(70.0)
    first, second = advice(scene)
    assert second.at - first.at >= 60.0


def test_minimum_is_loaded_while_requests_wait() -> None:
    scene = a_cluster()
    scene.models[MODEL.version_id] = kept = replace(MODEL, min_instances=1)
    scene.admit(MODEL, "r1")
    scene.apply(MinimumsSet((kept,)))
    scene.admit(MODEL, "r2")
    scene.finish_loads()
    scene.pass_time_with_beats(2.0)
    assert len(scene.policy.state.instances.of_version(MODEL.version_id)) == 1
    assert scene.placement("r1") is not None and scene.placement("r2") is not None
