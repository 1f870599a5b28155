"""Any inputs in any order: what holds after each of them, and once everything works again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.scheduler.policy.invariants import (
    CheckedPolicy,
    actions_due,
    check_view_is_true,
    decide_on_all,
    instances_of,
    is_known,
    placements_of,
    waiting_of,
)
from tests.unit.scheduler.policy.paper_cluster import MB, PaperCluster, a_model, a_store, a_worker
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.effects import (
    AdmissionRefused,
    Command,
    CopyCommand,
    LoadCommand,
    Placed,
    RefusalReason,
    SetRolesCommand,
    UnloadCommand,
)
from torchrelay.scheduler.policy.inputs import (
    Admit,
    CommandEnded,
    CommandId,
    CommandOutcome,
    Copy,
    FirstToken,
    GatewayChanged,
    Input,
    Load,
    MinimumsSet,
    RoleChange,
    StoreReported,
    Unload,
    Withdraw,
    WorkerReported,
)
from torchrelay.scheduler.policy.prediction import Outcome
from torchrelay.scheduler.policy.types import (
    Admission,
    AttemptKey,
    InstancePhase,
    Model,
    Role,
    ServiceClass,
    SlotStatus,
    StoreStatus,
    WorkerStatus,
)
from torchrelay.scheduler.service.input_log import PolicyStart

LIMITS: dict[str, Any] = {"max_instances": 2, "idle_timeout_s": 3.0}
MODELS = [a_model(f"{tenant}/m{number}", **LIMITS) for number, tenant in enumerate(("acme", "acme", "birch"))]
MODELS[2] = replace(MODELS[2], kv_share=0.7)
SHARED = replace(MODELS[0], name="cedar/m0", max_concurrency=1)  # the same files of another tenant
ALL_MODELS = {model.name: model for model in (*MODELS, SHARED)}
QUEUE_LIMIT = 6
POOL_BYTES = 4 * MB


def commands_lost(commands: Sequence[Command]) -> list[CommandId]:
    """The ids of commands that no peer has received."""
    ids: list[CommandId] = []
    for command in commands:
        match command:
            case LoadCommand():
                ids += [Load(order.instance_id) for hop in command.hops for order in hop.loads]
            case UnloadCommand():
                ids.append(Unload(command.instance_id))
            case SetRolesCommand():
                ids.append(RoleChange(command.instance_id))
            case CopyCommand():
                ids.append(Copy(command.model.pack_id, command.hop.store_id))
    return ids


class Policing(RuleBasedStateMachine):
    """``CheckedPolicy`` checks the state and the effects after each input."""

    @initialize(num_hosts=st.integers(1, 3), roles=st.sampled_from(["one each", "alike", "set apart"]))
    def start(self, num_hosts: int, roles: str) -> None:
        config = PolicyConfig(queue_limit=QUEUE_LIMIT, max_open_per_instance=5, idle_timeout_s=3.0)
        self.scene = PaperCluster(config)
        self.scene.policy = CheckedPolicy(self.scene.policy)
        self.open: set[AttemptKey] = set()
        self.placements: dict[AttemptKey, Placed] = {}
        self.dead: dict[str, tuple[WorkerStatus, float]] = {}  # and when they were known to be dead
        self.minimums: tuple[Model, ...] = ()
        self.had_minimum = False
        self.number = 0
        self.num_seen = 0
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

    # Requests

    @rule(
        model=st.sampled_from([*ALL_MODELS.values()]),
        tokens=st.integers(1, 2000),
        choices=st.integers(1, 2),
        service_class=st.sampled_from(ServiceClass),
        ttft_target_s=st.sampled_from([0.0, 31.0]),
    )
    def request_arrives(self, model: Model, tokens: int, choices: int, **asked: ServiceClass | float) -> None:
        self.admit(model, tokens, choices, **asked)

    def admit(self, model: Model, tokens: int, choices: int = 1, **changes: Any) -> None:
        self.number += 1
        request_id = f"r{self.number}"
        self.open.add(AttemptKey(request_id, 1))
        self.scene.admit(model, request_id, num_prompt_tokens=tokens, max_tokens=20, num_choices=choices, **changes)

    @rule(model=st.sampled_from(MODELS), num_requests=st.integers(QUEUE_LIMIT, 3 * QUEUE_LIMIT))
    def burst_arrives(self, model: Model, num_requests: int) -> None:
        """Enough for more instances than the model may have."""
        for _ in range(num_requests):
            self.admit(model, tokens=100)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def gateway_asks_again(self, data: st.DataObject) -> None:
        key, state = data.draw(st.sampled_from(sorted(self.open))), self.scene.policy.state
        admission, placement = self.admissions()[key], placements_of(state).get(key)
        self.scene.tick()  # what is due happens, asked again or not
        if placements_of(state).get(key) is not placement or (placement is None and key not in waiting_of(state)):
            return  # it was placed or refused just now
        before = placements_of(state).keys(), waiting_of(state).keys()
        effects = self.scene.policy.apply(Admit(admission, ALL_MODELS[admission.model]), self.scene.now)
        assert (placements_of(state).keys(), waiting_of(state).keys()) == before
        assert not effects.commands
        again = [answer.placement for answer in effects.answers if isinstance(answer, Placed)]
        assert again == ([placement] if placement is not None else [])
        self.scene.do(effects)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def first_token_arrives(self, data: st.DataObject) -> None:
        self.scene.apply(FirstToken(data.draw(st.sampled_from(sorted(self.open)))))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), withdraw=st.booleans())
    def request_ends(self, data: st.DataObject, withdraw: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.open)))
        self.open.discard(key)
        if withdraw:
            self.scene.apply(Withdraw(key))
        else:
            outcome = Outcome(ttft_s=0.1, tbt_s=0.02, num_output_tokens=20, ended_at=self.scene.now)
            self.scene.release(key.request_id, outcome=outcome)

    @rule()
    def gateway_reconnects(self) -> None:
        self.scene.apply(GatewayChanged("gateway-1", False))
        self.scene.apply(GatewayChanged("gateway-1", True))
        running, waiting = self.admissions_again()
        for input_ in (*running, *waiting):
            self.scene.apply(input_)

    def admissions(self) -> dict[AttemptKey, Admission]:
        """The open requests, as the policy has them."""
        state = self.scene.policy.state
        return waiting_of(state) | {each.admission.key: each.admission for each in state.attempts.attempts()}

    def admissions_again(self) -> tuple[list[Input], list[Input]]:
        """What the gateway sends on a new stream: the open requests that run, with their placements, and the others."""
        running: list[Input] = []
        waiting: list[Input] = []
        for key, admission in self.admissions().items():
            placed = self.placements[key].placement if key in placements_of(self.scene.policy.state) else None
            (waiting if placed is None else running).append(Admit(admission, ALL_MODELS[admission.model], placed))
        return running, waiting

    # Time and peers

    @rule(seconds=st.sampled_from([0.0, 0.5, 4.0, 12.0]), loads_end=st.booleans())
    def time_passes(self, seconds: float, loads_end: bool) -> None:
        if loads_end:
            self.scene.finish_loads()
        self.scene.pass_time(seconds, step_s=0.25)

    @precondition(lambda self: self.scene.workers)
    @rule(data=st.data())
    def worker_dies(self, data: st.DataObject) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.scene.workers)))
        worker = self.scene.workers[worker_id]
        if is_known(self.scene.policy.state, worker):
            self.dead[worker_id] = worker, self.scene.now
        self.scene.kill(worker_id)

    @precondition(lambda self: self.scene.workers)
    @rule(data=st.data())
    def worker_is_told_to_end(self, data: st.DataObject) -> None:
        """Nothing is loaded there any more."""
        worker_id = data.draw(st.sampled_from(sorted(self.scene.workers)))
        self.scene.workers[worker_id] = replace(self.scene.workers[worker_id], is_leaving=True)
        self.scene.report(worker_id)

    @rule(data=st.data())
    def late_report_of_dead_process_changes_nothing(self, data: st.DataObject) -> None:
        now, fence_s = self.scene.now, self.scene.config.fence_s
        if dead := [worker for worker, died_at in self.dead.values() if now < died_at + fence_s]:
            late = replace(data.draw(st.sampled_from(dead)), seen_at=now)
            assert not self.scene.policy.apply(WorkerReported(late, data.draw(st.booleans())), now)

    @rule()
    def workers_return(self) -> None:
        for worker_id, worker in self.all_workers.items():
            if worker_id not in self.scene.workers:
                self.number += 1
                self.scene.workers[worker_id] = replace(worker, incarnation=f"{worker_id} {self.number}")
        self.scene.report_all()

    @rule(data=st.data(), is_told=st.booleans())
    def load_breaks(self, data: st.DataObject, is_told: bool) -> None:
        loading = sorted(w.worker_id for w in self.scene.workers.values() if w.slot.phase is InstancePhase.LOADING)
        if loading:
            worker_id = data.draw(st.sampled_from(loading))
            worker = self.scene.workers[worker_id]
            self.scene.workers[worker_id] = replace(worker, slot=SlotStatus(error="bytes were lost"))
            if is_told:
                self.scene.report(worker_id)

    @precondition(lambda self: self.scene.workers)
    @rule(data=st.data())
    def worker_restarts_unnoticed(self, data: st.DataObject) -> None:
        """Its next report tells."""
        worker_id = data.draw(st.sampled_from(sorted(self.scene.workers)))
        self.number += 1
        pool_bytes = data.draw(st.sampled_from([POOL_BYTES, 2 * POOL_BYTES]))
        restarted = replace(self.all_workers[worker_id], incarnation=f"{worker_id} {self.number}")
        self.scene.workers[worker_id] = replace(restarted, kv_pool_bytes=pool_bytes)

    @rule(model=st.sampled_from(MODELS), data=st.data())
    def store_evicts_or_receives(self, model: Model, data: st.DataObject) -> None:
        """Its next report tells."""
        store_id = data.draw(st.sampled_from(sorted(self.scene.stores)))
        store = self.scene.stores[store_id]
        if model.pack_id in store.copies:
            copies = {key: copy for key, copy in store.copies.items() if key != model.pack_id}
            self.scene.stores[store_id] = replace(store, copies=copies)
        else:
            num_verified, error = data.draw(st.sampled_from([(3, ""), (8, ""), (3, "its source died")]))
            self.scene.hold(store_id, model, num_chunks_verified=num_verified, error=error)

    @rule(seconds=st.sampled_from([0.25, 2.0]))
    def commands_are_lost(self, seconds: float) -> None:
        self.scene.obedient, begin = False, len(self.scene.commands)
        self.scene.pass_time(seconds, step_s=0.25)
        self.scene.obedient = True
        for command_id in commands_lost(self.scene.commands[begin:]):
            self.scene.apply(CommandEnded(command_id, CommandOutcome.UNANSWERED, "its deadline passed"))

    @rule(
        command=st.sampled_from([Load("gone"), RoleChange("gone"), Unload("gone"), Copy("gone", "store-0")]),
        outcome=st.sampled_from(CommandOutcome),
    )
    def outcome_of_ended_command_changes_nothing(self, command: CommandId, outcome: CommandOutcome) -> None:
        assert not self.scene.policy.apply(CommandEnded(command, outcome, "too late"), self.scene.now)

    @rule(data=st.data())
    def reports_in_any_order_make_the_view_true(self, data: st.DataObject) -> None:
        numbers = range(len(self.scene.workers) + len(self.scene.stores))
        again = data.draw(st.lists(st.sampled_from(numbers), max_size=3))
        for number in data.draw(st.permutations([*numbers, *again])):
            self.scene.apply(self.reports()[number])  # with what earlier reports have caused
        check_view_is_true(self.scene.policy.state, self.scene.workers.values(), self.scene.stores.values())

    def reports(self) -> list[Input]:
        scene = self.scene
        workers = (replace(worker, seen_at=scene.now) for worker in scene.workers.values())
        stores = (replace(store, seen_at=scene.now) for store in scene.stores.values())
        return [*(WorkerReported(each, True) for each in workers), *(StoreReported(each, True) for each in stores)]

    # Decisions

    @rule(models=st.sets(st.sampled_from(MODELS), max_size=2))
    def minimums_are_set(self, models: set[Model]) -> None:
        self.minimums = tuple(replace(model, min_instances=1) for model in sorted(models, key=lambda each: each.name))
        self.had_minimum |= bool(models)
        self.scene.apply(MinimumsSet(self.minimums))

    @rule()
    def decision_leaves_nothing_to_decide(self) -> None:
        state, now = self.scene.policy.state, self.scene.now
        decide_on_all(state, now)
        assert actions_due(state, now) == ()
        self.scene.do(state.take_effects())

    @rule(data=st.data())
    def another_scheduler_takes_over(self, data: st.DataObject) -> None:
        """It knows what peers report, and then what gateways ask for, and answers no request twice. Of the requests,
        those that run come first: another that is placed before would get their KV.
        """
        scene, before = self.scene, placements_of(self.scene.policy.state)
        self.number += 1
        self.dead.clear()
        running, waiting = self.admissions_again()
        inputs = [*running, *self.reports(), MinimumsSet(self.minimums)]
        start = PolicyStart(scene.config, scene.now, f"scheduler-{self.number}")
        scene.policy, num_answers = CheckedPolicy(start.policy()), len(scene.answers)
        scene.apply(GatewayChanged("gateway-1", True))
        for number in data.draw(st.permutations(range(len(inputs)))):
            scene.apply(inputs[number])
        for input_ in waiting:
            scene.apply(input_)
        answered = [answer.placement.key for answer in scene.answers[num_answers:] if isinstance(answer, Placed)]
        assert len(set(answered)) == len(answered) and not before.keys() & set(answered)

    @invariant()
    def requests_are_neither_lost_nor_placed_twice(self) -> None:
        scene, state = self.scene, self.scene.policy.state
        for answer in scene.answers[self.num_seen :]:
            if isinstance(answer, AdmissionRefused):
                self.open.discard(answer.key)
                assert answer.reason is not RefusalReason.TOO_LONG or "kv_share" in answer.message
                assert answer.reason is not RefusalReason.NO_CAPACITY or self.had_minimum, "it may have each slot"
                if answer.reason is RefusalReason.QUEUE_FULL:
                    assert answer.retry_after_s >= 1.0
            elif isinstance(answer, Placed):
                first = self.placements.setdefault(answer.placement.key, answer)
                assert first.placement == answer.placement
        self.num_seen = len(scene.answers)
        assert {*waiting_of(state), *placements_of(state)} == self.open

    def teardown(self) -> None:
        """Once everything works again and time passes, everyone who waits is served."""
        if not hasattr(self, "scene"):
            return
        for worker_id in [worker_id for worker_id, worker in self.scene.workers.items() if worker.is_leaving]:
            self.scene.kill(worker_id)
        self.workers_return()
        self.scene.apply(MinimumsSet(()))
        state = self.scene.policy.state
        for _ in range(60):
            for key in placements_of(state):
                self.scene.release(key.request_id)
            self.scene.pass_time(1.0, step_s=0.25)
            self.scene.finish_loads()
            if not waiting_of(state) and not instances_of(state):
                break
        assert not waiting_of(state)
        assert not instances_of(state)


TestPolicing = Policing.TestCase
TestPolicing.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
