"""Any inputs in any order: no request is lost, no KV is reserved twice, no cold model is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.unit.scheduler.policy.paper_cluster import MB, PaperCluster, a_model, a_store, a_worker
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.effects import AdmissionRefused, LoadCommand, Placed, RefusalReason
from torchrelay.scheduler.policy.inputs import Admit, GatewayChanged, Withdraw
from torchrelay.scheduler.policy.prediction import Outcome
from torchrelay.scheduler.policy.types import (
    AttemptKey,
    InstancePhase,
    Model,
    Role,
    ServiceClass,
    StoreStatus,
    WorkerStatus,
)

MAX_INSTANCES = 2
MODELS = [a_model(f"acme/m{number}", max_instances=MAX_INSTANCES, idle_timeout_s=3.0) for number in range(3)]
QUEUE_LIMIT = 6
POOL_BYTES = 4 * MB


class Policing(RuleBasedStateMachine):
    @initialize(num_hosts=st.integers(1, 3), roles=st.sampled_from(["one each", "alike", "set apart"]))
    def start(self, num_hosts: int, roles: str) -> None:
        config = PolicyConfig(queue_limit=QUEUE_LIMIT, max_open_per_instance=5)
        self.scene = PaperCluster(config)
        self.open: set[AttemptKey] = set()
        self.placements: dict[AttemptKey, Placed] = {}
        self.num_admitted = 0
        self.num_seen = 0
        self.num_commands_seen = 0
        peers: list[WorkerStatus | StoreStatus] = []
        for number in range(num_hosts):
            host_id = f"host-{number}"
            pool = {"kv_pool_bytes": POOL_BYTES}
            peers.append(a_store(f"store-{number}", host_id))
            for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
                playable = frozenset((role,)) if roles == "one each" else frozenset(Role)
                preferred = role if roles == "set apart" else None
                peers.append(a_worker(f"{name}-{number}", host_id, playable, preferred_role=preferred, **pool))
        self.scene.settle(*peers)
        self.all_workers = dict(self.scene.workers)

    @rule(
        model=st.sampled_from(MODELS),
        tokens=st.integers(1, 2000),
        choices=st.integers(1, 2),
        service_class=st.sampled_from(ServiceClass),
        ttft_target_s=st.sampled_from([0.0, 31.0]),
    )
    def one_comes(
        self, model: Model, tokens: int, choices: int, service_class: ServiceClass, ttft_target_s: float
    ) -> None:
        self.admit(model, tokens, choices, service_class=service_class, ttft_target_s=ttft_target_s)

    def admit(self, model: Model, tokens: int, choices: int = 1, **changes: Any) -> None:
        self.num_admitted += 1
        request_id = f"r{self.num_admitted}"
        self.open.add(AttemptKey(request_id, 1))
        self.scene.admit(model, request_id, num_prompt_tokens=tokens, max_tokens=20, num_choices=choices, **changes)

    @rule(model=st.sampled_from(MODELS), num_requests=st.integers(QUEUE_LIMIT, 3 * QUEUE_LIMIT))
    def a_burst_comes(self, model: Model, num_requests: int) -> None:
        """Enough for more instances than the model may have."""
        for _ in range(num_requests):
            self.admit(model, tokens=100)

    @rule(data=st.data())
    def admit_again(self, data: st.DataObject) -> None:
        if self.open:
            key = data.draw(st.sampled_from(sorted(self.open)))
            state = self.scene.policy.state
            attempt = state.attempts.get(key)
            waiting = next((admission for admission in state.queues if admission.key == key), None)
            admission = attempt.admission if attempt else waiting
            assert admission is not None
            self.scene.tick()  # what is due happens, asked again or not
            if state.attempts.get(key) is not attempt or (waiting is not None and key not in state.queues):
                return  # it was placed or refused just now
            before = (len(state.attempts), len(state.queues))
            model = self.scene.models[admission.version_id]
            effects = self.scene.policy.apply(Admit(admission, model), self.scene.now)
            assert (len(state.attempts), len(state.queues)) == before
            assert not effects.commands
            again = [answer.placement for answer in effects.answers if isinstance(answer, Placed)]
            assert again == ([attempt.placement] if attempt is not None else [])
            self.scene.do(effects)

    @rule(data=st.data(), withdraw=st.booleans())
    def end(self, data: st.DataObject, withdraw: bool) -> None:
        if self.open:
            key = data.draw(st.sampled_from(sorted(self.open)))
            self.open.discard(key)
            if withdraw:
                self.scene.apply(Withdraw(key))
            else:
                outcome = Outcome(ttft_s=0.1, tbt_s=0.02, num_output_tokens=20, ended_at=self.scene.now)
                self.scene.release(key.request_id, outcome=outcome)

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.scene.pass_time(seconds, step_s=0.25)

    @rule()
    def loads_end(self) -> None:
        self.scene.finish_loads()

    @rule(data=st.data())
    def worker_dies(self, data: st.DataObject) -> None:
        if self.scene.workers:
            self.scene.kill(data.draw(st.sampled_from(sorted(self.scene.workers))))

    @rule()
    def workers_return(self) -> None:
        for worker_id, worker in self.all_workers.items():
            if worker_id not in self.scene.workers:
                self.num_admitted += 1
                self.scene.workers[worker_id] = replace(worker, incarnation=f"{worker_id} {self.num_admitted}")
        self.scene.report_all()

    @rule(data=st.data())
    def load_breaks(self, data: st.DataObject) -> None:
        loading = sorted(w.worker_id for w in self.scene.workers.values() if w.slot.phase is InstancePhase.LOADING)
        if loading:
            worker_id = data.draw(st.sampled_from(loading))
            worker = self.scene.workers[worker_id]
            self.scene.workers[worker_id] = replace(worker, slot=replace(a_worker("x").slot, error="bytes were lost"))
            self.scene.report(worker_id)

    @rule()
    def gateway_reconnects(self) -> None:
        scene = self.scene
        scene.apply(GatewayChanged("gateway-1", False))
        scene.apply(GatewayChanged("gateway-1", True))
        state = scene.policy.state
        for admission in [*state.queues, *(attempt.admission for attempt in state.attempts.attempts())]:
            attempt = state.attempts.get(admission.key)
            current = attempt.placement if attempt else None
            scene.apply(Admit(admission, scene.models[admission.version_id], current))

    @invariant()
    def requests_are_neither_lost_nor_placed_twice(self) -> None:
        scene = self.scene
        scene.check()
        state = scene.policy.state
        for answer in scene.answers[self.num_seen :]:
            if isinstance(answer, AdmissionRefused):
                self.open.discard(answer.key)
                assert answer.reason not in (RefusalReason.NO_CAPACITY, RefusalReason.TOO_LONG)
                if answer.reason is RefusalReason.QUEUE_FULL:
                    assert answer.retry_after_s >= 1.0
            elif isinstance(answer, Placed):
                first = self.placements.setdefault(answer.placement.key, answer)
                assert first.placement == answer.placement
        self.num_seen = len(scene.answers)
        waiting = {admission.key for admission in state.queues}
        placed = {attempt.admission.key for attempt in state.attempts.attempts()}
        assert not waiting & placed
        assert waiting | placed == self.open
        assert all(state.queues.num_waiting(model.version_id) <= QUEUE_LIMIT for model in MODELS)

    @invariant()
    def instances_keep_their_bounds(self) -> None:
        state = self.scene.policy.state
        staying = Counter((i.version_id, role) for i in state.instances if i.staying for role in i.target_roles)
        assert all(number <= MAX_INSTANCES for number in staying.values()), staying
        for command in self.scene.commands[self.num_commands_seen :]:
            if isinstance(command, LoadCommand):
                assert len({hop.store_id for hop in command.hops}) == len(command.hops)
        self.num_commands_seen = len(self.scene.commands)

    def teardown(self) -> None:
        """Once everything works again and time passes, everyone who waits is served."""
        if not hasattr(self, "scene"):
            return
        self.workers_return()
        for key in sorted(key for key in self.open if key in self.placements):
            self.scene.release(key.request_id)
        state = self.scene.policy.state
        for _ in range(60):
            self.scene.pass_time(1.0, step_s=0.25)
            self.scene.finish_loads()
            for attempt in state.attempts.attempts():
                self.scene.release(attempt.admission.key.request_id)
            if not len(state.queues) and not list(state.instances):
                break
        assert len(self.scene.policy.state.queues) == 0
        assert list(self.scene.policy.state.instances) == []


TestPolicing = Policing.TestCase
TestPolicing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
