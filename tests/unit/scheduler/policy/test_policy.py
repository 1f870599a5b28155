"""The policy as a whole: cold starts, growth, idleness, sharing, restarts, and other strategies."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests.unit.scheduler.policy.paper_cluster import (
    MB,
    PaperCluster,
    a_copy,
    a_model,
    a_store,
    a_worker,
    hosts,
    one_host,
    two_workers_one_host,
)
from torchrelay.scheduler.policy.config import TURN_S, PolicyConfig
from torchrelay.scheduler.policy.effects import RefusalReason, UnloadCommand
from torchrelay.scheduler.policy.inputs import Release, Withdraw
from torchrelay.scheduler.policy.prediction import Outcome
from torchrelay.scheduler.policy.types import REMOTE, AttemptKey, InstancePhase, Model

MODEL = a_model()


def test_model_outside_ram_wakes_on_host_with_disk_copy() -> None:
    scene = hosts(3)
    store = scene.stores["store-2"]
    scene.stores["store-2"] = replace(store, disk_pack_ids=frozenset({MODEL.pack_id}))
    scene.report_all()
    scene.admit(MODEL, "r1")
    (hop,) = scene.loads()[-1].hops
    assert hop.store_id == "store-2" and hop.sources == (REMOTE,)


def test_length_of_an_answer_is_that_of_all_its_attempts() -> None:
    scene = two_workers_one_host()
    for number in range(8):
        first, second = AttemptKey(f"r{number}", 1), AttemptKey(f"r{number}", 2)
        scene.serve(MODEL, first.request_id)
        scene.apply(Release(first, True, Outcome(num_output_tokens=512), goes_on=True))
        scene.admit(MODEL, second.request_id, attempt=2, num_forced_tokens=512)
        scene.apply(Release(second, True, Outcome(num_output_tokens=1000)))
    assert scene.policy.state.versions.of(MODEL.version_id).usage.answers.mean == 1512


@pytest.mark.parametrize(
    ("model", "admitted", "told"),
    [
        ({"pack_bytes": 5000 * MB}, {}, f"{5000 * MB:,} bytes; the largest slot holds {1024 * MB:,}"),
        ({}, {"max_tokens": 100_000}, "of KV"),
        ({"num_devices": 4}, {}, "acme/tiny needs a slot of 4 devices; no worker has one"),
        ({"engine": "vllm"}, {}, "acme/tiny needs a worker with the engine vllm; no worker has it"),
        ({"engine": "vllm", "num_devices": 4}, {}, "a worker with the engine vllm on 4 devices; no worker has it"),
    ],
)
def test_request_that_no_slot_can_hold_is_refused(model: dict[str, Any], admitted: dict[str, Any], told: str) -> None:
    scene = two_workers_one_host()
    scene.admit(a_model(**model), "r1", **admitted)
    scene.pass_time(scene.config.unserved_s + 1)
    refusal = scene.refused("r1")
    is_long = "max_tokens" in admitted
    assert refusal.reason is (RefusalReason.TOO_LONG if is_long else RefusalReason.NO_CAPACITY)
    assert told in refusal.message, refusal


def kept_s(scene: PaperCluster, model: Model, load_s: float = 0.0) -> float:
    """How long the slot of an unused model is kept that was loaded in ``load_s``."""
    scene.admit(model, "r1")
    scene.pass_time(load_s)
    scene.finish_loads()
    scene.release("r1")
    begin = scene.now
    while list(scene.policy.state.instances):
        scene.pass_time(0.25, step_s=0.25)
        assert scene.now - begin < 200.0
    return scene.now - begin


@pytest.mark.parametrize(("num_devices", "own_s", "expected"), [(1, 0.0, 8.0), (4, 0.0, 8.0), (4, 5.0, 5.0)])
def test_slot_is_kept_for_the_timeout_of_the_scheduler_or_of_the_model(
    num_devices: int, own_s: float, expected: float
) -> None:
    workers = a_worker("w-a", num_devices=num_devices), a_worker("w-b", num_devices=num_devices)
    scene = one_host(*workers, idle_timeout_s=8.0)
    assert kept_s(scene, a_model(idle_timeout_s=own_s, num_devices=num_devices)) == pytest.approx(expected, abs=0.6)


@pytest.mark.parametrize(
    ("load_s", "late_cost_s", "num_devices", "expected"),
    [(0.5, 60.0, 1, 10.0), (8.0, 60.0, 1, 154.75), (8.0, 10.0, 1, 34.5), (8.0, 40.0, 4, 34.5)],
    ids=["a load that nobody notices", "a long load", "cheap lateness", "four devices"],
)
def test_slot_is_kept_for_as_long_as_the_next_load_costs(
    load_s: float, late_cost_s: float, num_devices: int, expected: float
) -> None:
    """The load, the request that waits for it, of 2 s and so late with the weight 1 + log(8 / 2), and some more."""
    worker = a_worker("w-a", num_devices=num_devices)
    model = a_model(num_devices=num_devices)
    store = a_store("store-1", "host-1", [a_copy(model)])
    scene = PaperCluster(PolicyConfig(late_cost_s=late_cost_s)).settle(store, worker)
    assert kept_s(scene, model, load_s) == pytest.approx(expected, abs=1.0)


def test_idle_models_go_back_to_zero_after_their_own_timeout() -> None:
    scene = two_workers_one_host()
    model = a_model(idle_timeout_s=5.0)
    scene.serve(model, "r1")
    scene.pass_time(20)
    assert all(worker.slot.phase is InstancePhase.READY for worker in scene.workers.values())  # r1 still runs
    scene.release("r1")
    scene.pass_time(4.5)
    assert all(worker.slot.phase is InstancePhase.READY for worker in scene.workers.values())
    scene.pass_time(1.0)
    assert all(worker.slot.phase is InstancePhase.FREE for worker in scene.workers.values())
    assert list(scene.policy.state.instances) == []
    events = [happening.topic for happening in scene.events]
    for event in ("scale.up", "instance.loading", "instance.ready", "instance.draining", "instance.released"):
        assert event in events
    told = {event.topic: event for event in scene.events}
    assert told["instance.ready"].reason.startswith("all 4 layers loaded in ")
    assert told["instance.ready"].fields["num_layers"] == 4
    assert (told["scale.up"].fields["cause"], told["scale.up"].fields["num_waiting"]) == ("at_zero", 1)
    assert (told["scale.down"].fields["cause"], told["scale.down"].fields["idle_timeout_s"]) == ("idle", 5.0)
    assert told["instance.released"].fields["cause"] == "idle"
    scene.admit(model, "r2")
    assert scene.placement("r2") is not None


def test_wake_without_waiting_request_is_cancelled() -> None:
    scene = two_workers_one_host(idle_timeout_s=60.0)
    admission = scene.admit(a_model(), "r1")
    scene.apply(Withdraw(admission.key))
    scene.pass_time(0.9)
    assert all(
        worker.slot.phase is InstancePhase.LOADING for worker in scene.workers.values()
    )  # it may come again at once
    scene.pass_time(0.3)
    assert all(worker.slot.phase is InstancePhase.FREE for worker in scene.workers.values())
    assert "cancel" in scene.kinds()


def test_idle_model_gives_slot_to_waiting_model() -> None:
    scene = two_workers_one_host()
    first, second = a_model("acme/first"), a_model("acme/second")
    scene.serve(first, "r1")
    scene.release("r1")
    scene.pass_time(0.2)
    scene.admit(second, "r2")
    assert scene.placement("r2") is not None
    assert "evict" in scene.kinds()
    evicted = next(happening for happening in scene.told("evict"))
    assert "acme/second" in evicted.reason
    # The other slot stays with the first model, which goes on in it.
    scene.admit(first, "r3")
    assert scene.placement("r3") is not None


def test_burst_wakes_three_hosts_by_one_chain() -> None:
    scene = hosts(3)
    scene.obedient = False
    model = a_model(max_instances=3)
    for number in range(40):
        scene.admit(model, f"r{number}", num_prompt_tokens=500)
    hops = [hop for wake in scene.loads() for hop in wake.hops]
    assert len(hops) == 3 and len({hop.store_id for hop in hops}) == 3
    assert [hop.sources[0] for hop in hops] == [REMOTE, hops[0].store_id, hops[1].store_id]
    for wake in scene.loads():
        scene.obey(wake)
    placements = [placement for number in range(40) if (placement := scene.placement(f"r{number}"))]
    assert len({placement.prefill.instance_id for placement in placements}) == 3
    assert {worker.slot.phase for worker in scene.workers.values()} == {InstancePhase.LOADING}


def test_idle_instances_found_at_restart_end_by_default_timeout() -> None:
    old = two_workers_one_host()
    old.serve(a_model(), "r1")
    scene = PaperCluster(PolicyConfig(idle_timeout_s=3.0), now=old.now)
    scene.workers, scene.stores = old.workers, old.stores
    scene.pass_time(2.0)
    assert scene.commands == []
    scene.pass_time(2.0)
    assert [type(command) for command in scene.commands] == [UnloadCommand, UnloadCommand]


def test_turns_drain_idle_models_and_evaluate_few_others() -> None:
    """At ticks alone, all that became idle in a tenth of a second was told to go at once."""
    scene = PaperCluster(PolicyConfig(replicate=False, idle_timeout_s=5.0))
    models = [a_model(f"acme/m{number}") for number in range(8)]
    scene.settle(a_store("s1", "h1"), *(a_worker(f"w{number}", "h1") for number in range(8)))
    for model in models:
        scene.now += 0.01
        scene.admit(model, model.name)
    scene.finish_loads()
    for model in models:
        scene.now += TURN_S
        scene.release(model.name)
    scene.pass_time(4.8)
    begin = len(scene.commands)
    drained: list[int] = []
    while len(drained) < 40:
        scene.now += TURN_S
        scene.tick()
        drained.append(sum(isinstance(command, UnloadCommand) for command in scene.commands[begin:]))
    assert drained[-1] == len(models)
    assert max(after - before for before, after in pairwise(drained)) == 1
