"""Each request ends, whatever clients, workers and loads do, within a bound: served, or refused with a cause. No
request is lost or placed twice, no KV is reserved twice, no cold model is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.scheduler.policy.invariants import CheckedPolicy
from tests.unit.scheduler.policy.paper_cluster import DECODE, MB, PREFILL, a_model, a_store, a_worker
from tests.unit.scheduler.policy.running_cluster import CONFIG, Fault, RunningCluster
from torchrelay.scheduler.policy.types import Model, Role, ServiceClass

VERSIONS = [a_model(f"acme/m{number}") for number in range(3)]
MODELS = [*VERSIONS, a_model("beta/m0", version_id=VERSIONS[0].version_id, pack_id=VERSIONS[0].pack_id)]


class Running(RuleBasedStateMachine):
    """A cluster in which a single worker of both roles stays well, and anything may happen to the others."""

    @initialize(num_others=st.integers(0, 4), roles=st.sampled_from(["one each", "alike", "set apart"]))
    def start(self, num_others: int, roles: str) -> None:
        self.scene = RunningCluster(tokens_per_s=8000.0, load_s=0.5)
        self.scene.policy = CheckedPolicy(self.scene.policy)
        self.numbers = 0
        self.had_liar = False
        others = [
            a_worker(
                f"w{number}",
                f"host-{number % 2}",
                (PREFILL, DECODE)[number % 2] if roles == "one each" else frozenset(Role),
                preferred_role=tuple(Role)[number % 2] if roles == "set apart" else None,
                kv_pool_bytes=4 * MB,
            )
            for number in range(num_others)
        ]
        self.others = {worker.worker_id: worker for worker in others}
        self.scene.settle(
            a_store("store-0", "host-0"),
            a_store("store-1", "host-1"),
            # As many of the longest requests at once as may be open: three models take turns of about 6 s, and a model
            # whose 12 waiting requests needed a third turn would exceed its clients' 60 s.
            a_worker("well", "host-0", kv_pool_bytes=16 * MB),
            *others,
        )

    @rule(
        model=st.sampled_from(MODELS),
        num_tokens=st.sampled_from([1, 100, 1500]),
        decode_s=st.sampled_from([0.0, 0.3, 6.0]),
        service_class=st.sampled_from(ServiceClass),
        ttft_target_s=st.sampled_from([0.0, 31.0]),
        num_calls=st.sampled_from([1, 1, 3, CONFIG.queue_limit + 2]),
    )
    def some_come(
        self, model: Model, num_tokens: int, decode_s: float, num_calls: int, **asked: ServiceClass | float
    ) -> None:
        for _ in range(num_calls):
            self.numbers += 1
            self.scene.call(f"r{self.numbers}", model, num_tokens, decode_s, **asked)

    @rule(data=st.data())
    def one_leaves(self, data: st.DataObject) -> None:
        if self.scene.is_gateway_here and (calls := self.scene.open_calls):
            self.scene.leave(calls[data.draw(st.integers(0, len(calls) - 1))])

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.scene.pass_time(seconds)

    @precondition(lambda self: self.others)
    @rule(data=st.data(), fault=st.sampled_from([None, *Fault]))
    def one_changes(self, data: st.DataObject, fault: Fault | None) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.others)))
        self.scene.faults.pop(worker_id, None)
        self.had_liar = self.had_liar or fault is Fault.IDLE_LIAR
        if fault is not None:
            self.scene.faults[worker_id] = fault

    @precondition(lambda self: self.others)
    @rule(data=st.data())
    def one_dies_or_returns(self, data: st.DataObject) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.others)))
        self.numbers += 1
        if worker_id in self.scene.workers:
            self.scene.kill(worker_id)
        else:
            self.scene.restart(self.others[worker_id], self.numbers)

    @rule()
    def gateway_comes_or_goes(self) -> None:
        if self.scene.is_gateway_here:
            self.scene.disconnect()
        else:
            self.scene.reconnect()

    @invariant()
    def limits_hold(self) -> None:
        scene = self.scene
        scene.hear()
        scene.check_calls()
        assert len(scene.policy.state.queues) <= CONFIG.queue_limit_total
        assert all(call.num_recalled <= 1 for call in scene.calls.values())

    def teardown(self) -> None:
        """With a single well worker and the others as they are, each request is served or refused with a cause."""
        if not hasattr(self, "scene"):
            return
        scene = self.scene
        if not scene.is_gateway_here:
            scene.reconnect()
        last = scene.now
        while scene.open_calls:
            scene.pass_time(1.0)
            scene.check_calls()
            assert scene.now < last + 65.0, (scene.faults, scene.open_calls)
        late = [call for call in scene.calls.values() if call.end.startswith("DEADLINE")]
        assert not late or self.had_liar, (scene.faults, late)
        assert not [call for call in scene.calls.values() if call.end.startswith(("NO_CAPACITY", "TOO_LONG"))]
        scene.pass_time(15.0)
        state = scene.policy.state
        stuck = {worker_id for worker_id, fault in scene.faults.items() if fault is Fault.NEVER_DRAINS}
        assert {instance.worker_id for instance in state.instances} <= stuck
        assert not len(state.queues) and not len(state.attempts)


TestRunning = Running.TestCase
TestRunning.settings = settings(
    max_examples=int(os.environ.get("N", "10")),
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate] if "N" in os.environ else list(Phase),
    database=None,
)


def test_recalled_request_is_placed_as_soon_as_it_returns() -> None:
    """Its version is blocked for others meanwhile, as the instance that is free is kept for it, and no longer loads."""
    history = Running()
    history.start(num_others=4, roles="one each")
    scene, model = history.scene, VERSIONS[0]
    asked: dict[str, Any] = {"service_class": ServiceClass.INTERACTIVE, "ttft_target_s": 0.0}
    steps: tuple[Callable[[], object], ...] = (
        lambda: history.some_come(model=model, num_tokens=1, decode_s=6.0, num_calls=1, **asked),
        lambda: history.time_passes(seconds=0.1),
        lambda: history.time_passes(seconds=0.1),
        lambda: scene.leave(scene.open_calls[0]),
        lambda: history.some_come(model=model, num_tokens=1500, decode_s=0.0, num_calls=1, **asked),
        lambda: history.time_passes(seconds=0.5),
        lambda: scene.faults.update({"w0": Fault.NEVER_DRAINS}),
        lambda: scene.kill("w2"),
        lambda: scene.restart(history.others["w2"], 4),
        lambda: history.time_passes(seconds=0.5),
        lambda: history.some_come(model=model, num_tokens=1500, decode_s=6.0, num_calls=14, **asked),
        lambda: scene.kill("w1"),
    )
    for step in steps:
        step()
        history.limits_hold()
    while not any(call.num_recalled and call.attempt == 2 for call in scene.open_calls):
        history.time_passes(seconds=0.1)
    history.time_passes(seconds=1.0)
    assert all(call.placement is not None for call in scene.calls.values() if call.num_recalled)
