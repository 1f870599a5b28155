"""The cost of an event does not grow with the cluster. Counted in bytecodes, independent of the machine's load."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from tests.unit.scheduler.policy.paper_cluster import PaperCluster, a_copy, a_model, a_store, a_worker
from torchrelay.scheduler.policy.autoscaling import price
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.dispatch.placement import NoPlacement, place
from torchrelay.scheduler.policy.effects import Placed, RetainCommand
from torchrelay.scheduler.policy.handlers import replication, reserved_slots
from torchrelay.scheduler.policy.inputs import FirstToken, MinimumsSet, StoreReported, Tick, WorkerBeat
from torchrelay.scheduler.policy.types import AttemptKey, InstancePhase, Placement

MODEL = a_model("acme/m0")


def num_bytecodes(act: Callable[[], object]) -> int:
    num = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal num
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        num += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.disable()  # what other tests have left would be finalized, and counted
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
        gc.enable()
    return num


def a_cluster(num_hosts: int) -> PaperCluster:
    """Each host has a model's pack and three slots, two of them with the model."""
    scene = PaperCluster(PolicyConfig(replicate=False))
    models = [a_model(f"acme/m{number}") for number in range(num_hosts)]
    for number, model in enumerate(models):
        scene.settle(a_store(f"s{number}", f"h{number}", [a_copy(model)]))
    scene.settle(*(a_worker(f"w{number}-{letter}", f"h{number}") for number in range(num_hosts) for letter in "abc"))
    for number, model in enumerate(models):
        scene.admit(model, f"first of {number}")
    scene.finish_loads()
    scene.admit(MODEL, "open")
    return scene


def costs(num_hosts: int) -> dict[str, int]:
    scene = a_cluster(num_hosts)
    worker, store = scene.workers["w0-a"], scene.stores["s0"]
    events: dict[str, Callable[[], object]] = {
        "admission": lambda: scene.admit(MODEL, "another"),
        "first token": lambda: scene.apply(FirstToken(AttemptKey("open", 1))),
        "release": lambda: scene.release("open"),
        "worker's report": lambda: scene.report(worker.worker_id),
        "worker's beat": lambda: scene.apply(WorkerBeat(worker.worker_id, worker.incarnation, worker.progress)),
        "store's report": lambda: scene.apply(StoreReported(replace(store, seen_at=scene.now), streamed=True)),
    }
    return {name: num_bytecodes(event) for name, event in events.items()}


def test_event_cost_is_independent_of_cluster_size() -> None:
    """Each scanned all instances, all stores or all workers."""
    small, large = costs(2), costs(16)
    assert {name: large[name] / cost for name, cost in small.items()} == pytest.approx(
        dict.fromkeys(small, 1.0), abs=0.01
    )


def report_of_ready(num_waiting: int) -> int:
    """Cost of the report of a ready instance while ``num_waiting`` others load for waiting requests."""
    scene = PaperCluster(PolicyConfig(replicate=False))
    models = [a_model(f"acme/m{number}") for number in range(num_waiting + 1)]
    for number, model in enumerate(models):
        scene.settle(a_store(f"s{number}", f"h{number}", [a_copy(model)]), a_worker(f"w{number}", f"h{number}"))
    for number, model in enumerate(models):
        for each in range(64):
            scene.admit(model, f"{each} of {number}")
    assert len(scene.policy.state.queues.versions) == num_waiting + 1, "each has more than it can begin"
    worker_id = next(
        worker_id for worker_id, worker in scene.workers.items() if worker.slot.version_id == MODEL.version_id
    )
    scene.set_slot(worker_id, phase=InstancePhase.READY, num_layers_ready=4)
    return num_bytecodes(lambda: scene.report(worker_id))


def test_ready_instance_evaluates_own_model_only() -> None:
    """Every model that requests waited for was decided anew, though each had its slot."""
    assert report_of_ready(16) == pytest.approx(report_of_ready(2), rel=0.05)


def bytecodes_of_tick(num_slots: int, num_waiting: int) -> int:
    """Cost of a search for requests without a slot, if minimums hold all slots but the last."""
    kept = a_model("acme/kept", min_instances=num_slots - 1)
    scene = PaperCluster(PolicyConfig(replicate=False))
    scene.settle(
        a_store("s1", "h1", arena_bytes=1 << 40), *(a_worker(f"w{number}", "h1") for number in range(num_slots))
    )
    scene.models[kept.version_id] = kept
    scene.apply(MinimumsSet((kept,)))
    scene.finish_loads()
    scene.obedient = False
    for number in range(num_waiting):
        scene.admit(a_model(f"acme/m{number}"), f"of {number}")
    state = scene.policy.state
    assert len(state.queues) == num_waiting
    return num_bytecodes(lambda: reserved_slots.refuse_without_slot(state, scene.now))


def test_reserved_slots_are_grouped_once_for_all_models() -> None:
    """All workers were looked at for each model that requests waited for."""
    of_slots = bytecodes_of_tick(64, 2) - bytecodes_of_tick(16, 2)
    of_slots_for_many = bytecodes_of_tick(64, 32) - bytecodes_of_tick(16, 32)
    assert of_slots_for_many == pytest.approx(of_slots, rel=0.05)


def test_expired_requests_are_not_placed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them would be late at any place, and all were evaluated whenever a single request could be placed."""
    scene = PaperCluster(PolicyConfig(replicate=False)).settle(a_store("s1", "h1"), a_worker("w1", "h1"))
    for number in range(100):
        scene.admit(MODEL, f"r{number}", num_prompt_tokens=1000, ttft_target_s=0.5)
    scene.pass_time(1.0)
    num_looks = 0

    def look(*args: Any, **options: Any) -> Placement | NoPlacement:
        nonlocal num_looks
        num_looks += 1
        return place(*args, **options)

    strategies = replace(scene.policy.state.strategies, place=look)
    monkeypatch.setattr(scene.policy.state, "strategies", strategies)
    scene.finish_loads()
    placed = [each for each in scene.answers if isinstance(each, Placed)]
    assert len(placed) >= 1 and num_looks <= 2 * len(placed) + 2


def test_long_queue_is_cheap_while_settling() -> None:
    """For seconds after a start each tick looked for the largest slot for each request that waited: a tick's time."""

    def tick_cost(num_waiting: int) -> int:
        scene = PaperCluster(PolicyConfig(replicate=False, queue_limit=2000))
        scene.settle(a_store("s0", "h0", [a_copy(MODEL)]), *(a_worker(f"w{n}", "h0") for n in range(20)))
        for number in range(num_waiting):
            scene.admit(MODEL, f"r{number}", num_prompt_tokens=2000)
        assert len(scene.policy.state.queues) > num_waiting - 50
        scene.now += scene.config.whole_scale_every_s
        return num_bytecodes(lambda: scene.policy.apply(Tick(), scene.now))

    fewer, more = tick_cost(200), tick_cost(1200)
    assert (more - fewer) / 1000 < 100


def num_exchanges(monkeypatch: pytest.MonkeyPatch, num_busy: int) -> int:
    """Exchanges that a tick computes while a model waits and ``num_busy`` models use all slots."""
    scene = PaperCluster(PolicyConfig(replicate=False))
    models = [a_model(f"acme/m{number}") for number in range(num_busy)]
    scene.settle(
        a_store("s0", "h0", map(a_copy, models)), *(a_worker(f"w{number}", "h0") for number in range(num_busy))
    )
    for number in range(100):
        scene.admit(models[number % num_busy], f"r{number}")
        scene.finish_loads()
        scene.apply(FirstToken(AttemptKey(f"r{number}", 1)))
        scene.pass_time(0.1)
    waiting = a_model("acme/waiting")
    scene.admit(waiting, "waits")
    scene.pass_time(1.5)
    assert scene.policy.state.queues.versions == (waiting.version_id,)
    num_lost, num = price.num_lost, 0

    def count_exchange(*args: Any, **options: Any) -> Any:
        nonlocal num
        num += 1
        return num_lost(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr("torchrelay.scheduler.policy.autoscaling.eviction.exchange.num_lost", count_exchange)
        scene.pass_time(0.1)
    return num


def test_search_for_slot_evaluates_few_busy_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the 50 decisions in a second computed what every busy model would lose, for each waiting model."""
    assert num_exchanges(monkeypatch, 10) <= 4


def longest_replication(num_stores: int) -> int:
    """Cost of the longest of the ticks that decide on the copies of many packs in RAM and on disk."""
    scene, models = PaperCluster(PolicyConfig()), [a_model(f"acme/m{number}") for number in range(num_stores)]
    on_disk = frozenset(model.pack_id for model in models[:100])
    scene.settle(
        *(
            replace(a_store(f"s{number}", f"h{number}", [a_copy(model)]), disk_pack_ids=on_disk)
            for number, model in enumerate(models)
        )
    )
    scene.obedient = False
    state = scene.policy.state
    for model in models:
        state.replication_state.recent_packs.note(model, scene.now)
    costs = []
    for _ in range(30):
        scene.now += 0.1
        costs.append(num_bytecodes(lambda: replication.replicate(state, scene.now)))
    assert any(isinstance(command, RetainCommand) for command in state.effects.commands)
    return max(costs)


def test_replication_of_many_copies_is_spread_over_ticks() -> None:
    """One tick looked at all copies in RAM and on disk: 80 ms with 1,250 stores and 1,000 packs."""
    assert longest_replication(400) < 1.3 * longest_replication(200)


def test_too_large_requests_are_not_placed_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call for their model tried to place all of them, until its instances changed."""
    scene = PaperCluster(PolicyConfig(replicate=False)).settle(
        a_store("s1", "host-1"), a_worker("small", kv_pool_bytes=1 << 20), a_worker("large", kv_pool_bytes=1 << 26)
    )
    scene.kill("large")
    for number in range(20):
        scene.admit(MODEL, f"large {number}", num_prompt_tokens=2000, max_tokens=100)
    scene.admit(MODEL, "small", max_tokens=10)
    scene.finish_loads()
    assert scene.placement("small") is not None
    num_tries = 0

    def try_to_place(*args: Any, **options: Any) -> Placement | NoPlacement:
        nonlocal num_tries
        num_tries += 1
        return place(*args, **options)

    monkeypatch.setattr(scene.policy.state, "strategies", replace(scene.policy.state.strategies, place=try_to_place))
    scene.release("small")
    scene.pass_time(1.0)
    assert num_tries == 0
    scene.settle(a_worker("large", kv_pool_bytes=1 << 26, incarnation="large second"))
    scene.finish_loads()
    scene.pass_time(0.2)
    assert scene.placement("large 0") is not None, "the model has an instance that is large enough"
