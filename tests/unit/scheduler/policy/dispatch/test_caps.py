"""Limits of a model: requests at once, its share of the KV, and labels of hosts. Other models are not affected."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.scheduler.policy.paper_cluster import (
    MB,
    PaperCluster,
    a_model,
    a_store,
    a_worker,
    an_admission,
    one_host,
)
from torchrelay.scheduler.policy.cluster.instance import ReturningPrompt
from torchrelay.scheduler.policy.cluster.open_attempts import ModelWork
from torchrelay.scheduler.policy.dispatch.placement import is_within
from torchrelay.scheduler.policy.effects import RefusalReason
from torchrelay.scheduler.policy.inputs import FirstToken, MinimumsSet
from torchrelay.scheduler.policy.prediction import Outcome
from torchrelay.scheduler.policy.types import AttemptKey, Caps, Model, ServiceClass

BASE = a_model("acme/base")
ADAPTER = replace(BASE, name="acme/adapter")  # shares the instances
NEIGHBOUR = replace(BASE, name="birch/base")
KB_OF_REQUEST = 160  # 100 + 50 tokens in whole pages


def one_worker(model: Model, kv_pool_mb: int = 64) -> PaperCluster:
    scene = one_host(a_worker("w-a", kv_pool_bytes=kv_pool_mb * MB), max_instances=1)
    scene.warm_up(model)
    return scene


def placed_of(scene: PaperCluster, *request_ids: str) -> list[str]:
    return [request_id for request_id in request_ids if scene.placement(request_id) is not None]


def begin(scene: PaperCluster, request_id: str) -> None:
    """The first token comes, and the pause of the answers passes, so that the next prompt may come."""
    scene.pass_time(0.2)
    scene.apply(FirstToken(AttemptKey(request_id, 1)))
    scene.pass_time(0.2)


def test_full_model_waits_and_its_neighbours_do_not() -> None:
    capped = replace(BASE, max_concurrency=2)
    scene = one_worker(capped)
    for number in range(6):
        scene.admit(capped, f"own{number}", num_prompt_tokens=16, ttft_target_s=60.0)
        begin(scene, f"own{number}")
    own = [f"own{number}" for number in range(6)]
    assert placed_of(scene, *own) == own[:2]
    for model in (ADAPTER, NEIGHBOUR):
        scene.admit(model, model.name, num_prompt_tokens=16)
        assert scene.placement(model.name) is not None
        begin(scene, model.name)
    scene.release("own1")
    assert placed_of(scene, *own) == own[:3], "the next of the backlog, in its order"
    scene.release("own0")
    begin(scene, "own2")
    assert placed_of(scene, *own) == own[:4]
    scene.check()


def test_raised_limit_is_in_force_with_the_next_request() -> None:
    capped = replace(BASE, max_concurrency=1)
    scene = one_worker(capped)
    own = [f"own{number}" for number in range(4)]
    for request_id in own:
        scene.admit(capped, request_id, num_prompt_tokens=16)
    begin(scene, "own0")
    assert placed_of(scene, *own) == own[:1]
    scene.admit(replace(capped, max_concurrency=3), "more", num_prompt_tokens=16)
    for request_id in own[1:]:
        begin(scene, request_id)
    assert placed_of(scene, *own, "more") == own[:3]
    scene.admit(BASE, "last", num_prompt_tokens=16)
    for request_id in (*own, "more", "last"):
        begin(scene, request_id)
    assert placed_of(scene, *own, "more", "last") == [*own, "more", "last"]


def test_limits_of_waiting_requests_outlive_their_models_name() -> None:
    """A version knows the names of its last callers."""
    capped = replace(BASE, max_concurrency=1)
    scene = one_worker(capped)
    for request_id in ("first", "second"):
        scene.admit(capped, request_id, num_prompt_tokens=16)
        begin(scene, request_id)
    for number in range(70):
        scene.admit(replace(BASE, name=f"acme/adapter{number}"), f"r{number}", num_prompt_tokens=16)
        begin(scene, f"r{number}")
        scene.release(f"r{number}")
    assert placed_of(scene, "first", "second", "r69") == ["first", "r69"]
    assert BASE.name not in scene.policy.state.names_of(BASE.version_id)
    scene.release("first")
    assert placed_of(scene, "second") == ["second"]


def test_withdrawn_and_urgent_requests_of_a_full_model() -> None:
    capped = replace(BASE, max_concurrency=1)
    scene = one_worker(capped)
    for request_id, ttft_s in (("first", 2.0), ("slow", 20.0), ("gone", 1.0), ("soon", 3.0)):
        scene.admit(capped, request_id, num_prompt_tokens=16, ttft_target_s=ttft_s)
    scene.release("gone")
    begin(scene, "first")
    scene.release("first")
    assert placed_of(scene, "slow", "gone", "soon") == ["soon"], "the earliest deadline first"
    scene.check()


def test_timely_requests_of_a_full_model_go_before_late_ones() -> None:
    capped = replace(BASE, max_concurrency=1)
    scene = one_worker(capped)
    targets_s = {"first": 60.0, "expired": 2.0, "overdue": 2.1, "timely": 60.0}
    for request_id, ttft_s in targets_s.items():
        scene.admit(capped, request_id, num_prompt_tokens=16, ttft_target_s=ttft_s)
    begin(scene, "first")
    scene.now += 2.0
    scene.release("first")
    assert placed_of(scene, *targets_s) == ["first", "timely"]
    begin(scene, "timely")
    scene.release("timely")
    assert len(placed_of(scene, *targets_s)) == 3
    scene.check()


def test_batch_work_of_a_full_model_is_served_before_its_deadline() -> None:
    capped = replace(BASE, max_concurrency=1)
    scene = one_worker(capped)
    scene.admit(capped, "first", num_prompt_tokens=16)
    scene.admit(capped, "batch", num_prompt_tokens=16, service_class=ServiceClass.BATCH, ttft_target_s=40.0)
    for number in range(3):
        scene.admit(capped, f"chat{number}", num_prompt_tokens=16, ttft_target_s=100.0)
    begin(scene, "first")
    scene.release("first")
    assert placed_of(scene, "chat0", "batch") == ["chat0"]
    begin(scene, "chat0")
    scene.pass_time(15.0)
    scene.release("chat0")
    assert placed_of(scene, "chat1", "batch") == ["batch"]
    scene.check()


def test_share_of_kv_leaves_the_rest_to_neighbours() -> None:
    capped = replace(BASE, kv_share=0.25)
    scene = one_worker(capped, kv_pool_mb=1)  # six requests; the share holds one
    for number in range(3):
        scene.admit(capped, f"own{number}")
        begin(scene, f"own{number}")
    assert placed_of(scene, "own0", "own1", "own2") == ["own0"]
    for number in range(5):
        scene.admit(NEIGHBOUR, f"other{number}")
        begin(scene, f"other{number}")
        assert scene.placement(f"other{number}") is not None
    scene.check()
    scene.release("own0")
    assert placed_of(scene, "own1", "own2") == ["own1"]


def test_request_beyond_the_share_is_refused_with_the_setting() -> None:
    scene = one_worker(replace(BASE, kv_share=0.1), kv_pool_mb=1)
    scene.admit(replace(BASE, kv_share=0.1), "large")
    refusal = scene.refused("large")
    assert refusal.reason is RefusalReason.TOO_LONG and "(kv_share 0.1) has 104,857" in refusal.message
    scene.admit(NEIGHBOUR, "other")
    assert scene.placement("other") is not None


def test_lowered_share_refuses_waiting_requests_that_it_never_holds() -> None:
    scene = one_worker(BASE, kv_pool_mb=1)
    scene.pass_time(30.0, step_s=1.0)  # the time after the start in which all requests are compared with the slots
    for number in range(7):  # the last does not fit beside the others
        scene.admit(BASE, f"r{number}")
        begin(scene, f"r{number}")
    assert scene.placement("r6") is None
    scene.admit(replace(BASE, kv_share=0.1), "small", num_prompt_tokens=16, max_tokens=16)
    scene.pass_time(1.0)
    assert "(kv_share 0.1)" in scene.refused("r6").message
    assert scene.refusal("small") is None


def test_request_beyond_the_share_of_small_pools_gets_a_larger_slot() -> None:
    capped = replace(BASE, kv_share=0.5)
    scene = one_host(a_worker("w-small", kv_pool_bytes=MB), max_instances=2)
    scene.serve(capped, "small", num_prompt_tokens=16)
    scene.settle(a_worker("w-large", kv_pool_bytes=2 * MB))
    placement = scene.serve(capped, "large", num_prompt_tokens=700)  # 752 kB: half of the larger pool
    assert placement.decode.worker_id == "w-large"


def two_workers(**kv_pools_mb: int) -> PaperCluster:
    workers = [a_worker(f"w-{name}", kv_pool_bytes=size * MB) for name, size in kv_pools_mb.items()]
    scene = one_host(*workers, max_instances=2)
    scene.apply(MinimumsSet((replace(BASE, min_instances=2),)))
    scene.finish_loads()
    return scene


def test_large_request_of_a_full_model_does_not_hold_up_small_ones() -> None:
    capped = replace(BASE, max_concurrency=1)
    scene = two_workers(a=1, b=2)
    scene.admit(capped, "first", num_prompt_tokens=1100)
    begin(scene, "first")
    assert scene.placed("first").decode.worker_id == "w-b"
    scene.admit(capped, "large", num_prompt_tokens=1100, ttft_target_s=5.0)
    scene.admit(capped, "small", num_prompt_tokens=16, ttft_target_s=60.0)
    scene.admit(capped, "last", num_prompt_tokens=16, ttft_target_s=60.0)
    assert placed_of(scene, "large", "small", "last") == ["small"]
    begin(scene, "small")
    scene.release("first")
    assert placed_of(scene, "large", "small", "last") == ["large", "small"]
    scene.check()


def test_earliest_due_time_of_full_models_counts() -> None:
    first, second = (replace(BASE, name=name, max_concurrency=1) for name in ("acme/a", "acme/b"))
    scene = two_workers(a=64, b=64)
    scene.admit(first, "f1", num_prompt_tokens=20_000, ttft_target_s=600.0)
    scene.admit(second, "s1", num_prompt_tokens=10_000, ttft_target_s=600.0)
    assert scene.placed("f1").prefill.worker_id != scene.placed("s1").prefill.worker_id
    state = scene.policy.state
    scene.admit(first, "f2", num_prompt_tokens=16, ttft_target_s=600.0)
    due = state.due[BASE.version_id]
    scene.admit(second, "s2", num_prompt_tokens=16, ttft_target_s=600.0)
    assert state.due[BASE.version_id] == due


def test_full_model_gets_further_instances() -> None:
    """A backlog that only its own limit holds up is demand for more instances, up to their maximum."""

    def num_instances(model: Model) -> int:
        scene = one_host(*(a_worker(f"w-{n}") for n in range(4)), max_instances=3, late_cost_s=5.0)
        scene.warm_up(model)
        for number in range(100):
            scene.admit(model, f"r{number}", num_prompt_tokens=16)
            begin(scene, f"r{number}")
            scene.finish_loads()
            if number >= 8:
                scene.release(f"r{number - 8}", outcome=Outcome(num_output_tokens=50))
        return len(scene.policy.state.instances.of_version(model.version_id))

    assert num_instances(BASE) == 1
    assert num_instances(replace(BASE, max_concurrency=2)) == 3


def test_model_is_loaded_on_hosts_with_its_labels_only() -> None:
    in_a = replace(BASE, hosts=frozenset(("zone=a",)))
    workers = [a_worker(f"w-{zone}", f"host-{zone}", labels=frozenset((f"zone={zone}",))) for zone in "ba"]
    scene = PaperCluster().settle(*(a_store(f"s-{zone}", f"host-{zone}") for zone in "ab"), *workers)
    assert scene.serve(in_a, "r1").decode.worker_id == "w-a"
    moved = replace(BASE, hosts=frozenset(("zone=b",)))
    scene.admit(moved, "r2")
    scene.release("r1")
    scene.release("r2")
    scene.pass_time(5.0)
    assert scene.serve(moved, "r3").decode.worker_id == "w-b", "its instance leaves the other host"
    assert "its host lacks labels that its model needs now" in [event.reason for event in scene.told("drain")]


def test_request_for_absent_labels_is_refused_with_them() -> None:
    scene = one_host(a_worker("w-a", labels=frozenset(("zone=a",))), unserved_s=2.0)
    scene.admit(replace(BASE, hosts=frozenset(("zone=c", "gpu=l4"))), "r1")
    refusal = scene.refused("r1")
    assert refusal.reason is RefusalReason.NO_CAPACITY
    assert refusal.message == ("acme/base needs a worker on a host with the labels gpu=l4, zone=c; no worker is there")


def test_labels_of_a_tenant_are_unknown_to_others() -> None:
    scene = one_host(a_worker("w-a", labels=frozenset(("zone=a",))), unserved_s=2.0)
    for model in (
        replace(BASE, hosts=frozenset(("gpu=l4",))),
        replace(NEIGHBOUR, hosts=frozenset(("gpu=l4", "rack=1"))),
    ):
        scene.admit(model, model.name)
    scene.admit(replace(BASE, name="cedar/base"), "cedar/base")
    scene.pass_time(5.0)
    told = [
        scene.refused(name).message.partition("on a host ")[2] for name in (BASE.name, NEIGHBOUR.name, "cedar/base")
    ]
    assert told == [
        "with the labels gpu=l4; no worker is there",
        "with the labels gpu=l4, rack=1; no worker is there",
        "that the platform's operator chose; no worker is there",
    ]


def test_limit_counts_returning_prompts_of_its_own_model() -> None:
    caps, admission = Caps(1, 1.0), an_admission(BASE, "r")
    (instance,) = one_worker(BASE).policy.state.instances.of_version(BASE.version_id)
    instance.returning["other"] = ReturningPrompt(ADAPTER.name, 1.0, 60.0)
    assert is_within(instance, admission, caps, 0)
    instance.returning["own"] = ReturningPrompt(BASE.name, 1.0, 60.0)
    assert not is_within(instance, admission, caps, 0)
    assert is_within(instance, an_admission(BASE, "own"), caps, 0), "its place is kept for it"


def test_limits_count_what_is_open() -> None:
    caps, work = Caps(2, 0.5), ModelWork(1, 100)
    assert work.is_within(caps, 100, 400) and not work.is_within(caps, 101, 400)
    assert not ModelWork(2, 0).is_within(caps, 0, 400)
    assert an_admission(BASE, "r").kv_bytes(BASE) == KB_OF_REQUEST << 10
