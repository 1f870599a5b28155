"""The cost of an event does not grow with the cluster. Counted in bytecodes, independent of the machine's load."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from tests.unit.scheduler.policy.paper_cluster import (
    MB,
    CountedPlacements,
    PaperCluster,
    a_copy,
    a_model,
    a_store,
    a_worker,
    an_admission,
    one_host,
)
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.effects import Placed
from torchrelay.scheduler.policy.inputs import Admit, Beat, FirstToken, GatewayChanged, StoreReported, Tick, Withdraw
from torchrelay.scheduler.policy.types import AttemptKey, Peer

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
        "worker's beat": lambda: scene.apply(Beat(Peer(worker.worker_id), worker.incarnation, worker.progress)),
        "store's report": lambda: scene.apply(StoreReported(replace(store, seen_at=scene.now), streamed=True)),
    }
    return {name: num_bytecodes(event) for name, event in events.items()}


def test_event_cost_is_independent_of_cluster_size() -> None:
    """Each scanned all instances, all stores or all workers."""
    small, large = costs(2), costs(16)
    assert {name: large[name] / cost for name, cost in small.items()} == pytest.approx(
        dict.fromkeys(small, 1.0), abs=0.01
    )


def test_expired_requests_are_not_placed_one_by_one(counted: CountedPlacements) -> None:
    """All of them would be late at any place, and all were evaluated whenever a single request could be placed."""
    scene = one_host("w1", replicate=False)
    for number in range(100):
        scene.admit(MODEL, f"r{number}", num_prompt_tokens=1000, ttft_target_s=0.5)
    scene.pass_time(1.0)
    counted.numbers.clear()
    scene.finish_loads()
    placed = [each for each in scene.answers if isinstance(each, Placed)]
    assert len(placed) >= 1 and len(counted.numbers) <= 2 * len(placed) + 2


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


def test_too_large_requests_are_not_placed_at_each_call(counted: CountedPlacements) -> None:
    """Each call for their model tried to place all of them, until its instances changed."""
    scene = one_host(a_worker("small", kv_pool_bytes=1 << 20), "large", replicate=False)
    scene.kill("large")
    for number in range(20):
        scene.admit(MODEL, f"large {number}", num_prompt_tokens=2000, max_tokens=100)
    scene.serve(MODEL, "small", max_tokens=10)
    assert scene.placement("small") is not None
    counted.numbers.clear()
    scene.release("small")
    scene.pass_time(1.0)
    assert not counted.numbers
    scene.settle(a_worker("large", incarnation="large second"))
    scene.finish_loads()
    scene.pass_time(0.2)
    assert scene.placement("large 0") is not None, "the model has an instance that is large enough"


def cost_of_an_admission(num_waiting: int, max_tokens: int, *, is_gateway_away: bool) -> int:
    """Cost of another request for the model, which is placed although all others cannot be."""
    no_store = a_worker("large", "host-2", kv_pool_bytes=1024 * MB)  # so nothing is loaded there
    scene = PaperCluster(PolicyConfig(queue_limit=1024)).settle(no_store)
    scene.apply(GatewayChanged("gateway-2", True))
    for number in range(num_waiting):
        scene.admit(MODEL, f"r{number}", max_tokens=max_tokens)
    if is_gateway_away:
        scene.apply(GatewayChanged("gateway-1", False))
    scene.settle(a_store("s1", "host-1"), a_worker("w"))
    scene.finish_loads()
    admission = an_admission(MODEL, "another", now=scene.now, gateway_id="gateway-2")
    num = num_bytecodes(lambda: scene.apply(Admit(admission, MODEL)))
    assert scene.placement("another") is not None and len(scene.policy.state.queues) == num_waiting
    return num


@pytest.mark.parametrize(("max_tokens", "is_gateway_away"), [(50, True), (100_000, False)])
def test_requests_that_cannot_be_placed_cost_others_little(max_tokens: int, is_gateway_away: bool) -> None:
    few, many = (cost_of_an_admission(num, max_tokens, is_gateway_away=is_gateway_away) for num in (50, 400))
    assert many <= few * 8


def test_withdrawal_evaluates_own_version_only() -> None:
    def cost_of_a_withdrawal(num_others: int) -> int:
        scene = one_host("w")
        for number in range(num_others):
            scene.admit(a_model(f"acme/other-{number}"), f"r{number}")
        admission = scene.admit(MODEL, "withdrawn")
        return num_bytecodes(lambda: scene.apply(Withdraw(admission.key)))

    assert cost_of_a_withdrawal(40) <= 1.5 * cost_of_a_withdrawal(10)
