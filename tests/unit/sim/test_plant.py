"""The scheduler's own policy on a simulated cluster."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import count

import msgspec
import pytest

from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.core import Role, ServiceClass
from torchrelay.scheduler.policy.effects import Effects, TakeBack, UnloadCommand
from torchrelay.scheduler.policy.inputs import Admit, Due, FirstToken, Input, Release, Tick, WorkerReported
from torchrelay.scheduler.policy.policy import Policy
from torchrelay.scheduler.policy.strategies import Strategies
from torchrelay.sim.fleets import served_model
from torchrelay.sim.plant import Plant, policy_model
from torchrelay.sim.policies.deadline_order import by_deadline
from torchrelay.sim.policies.distserve import StaticInstances
from torchrelay.sim.scenario import Fleet, Request, RequestOutcome

SMALL = served_model("t/small", 1, 8, 32, 131072, 0.45, 15e3, 0.1)
LARGE = served_model("t/large", 4, 72, 80, 327680, 1.25, 5.3e3, 0.2)
FLEET = Fleet(2, (4, 1, 1, 1, 1), 12.5e9, 25e9, 2.5e9, 480 * 10**9)
APART = Strategies(decide=StaticInstances([(policy_model(SMALL), 1, 1)], num_workers=10))  # prefill and decode


def requests(model: str, number: int, every_s: float, num_prompt: int = 1000, num_output: int = 50) -> list[Request]:
    return [Request(f"{model} {n}", n * every_s, model, num_prompt, num_output) for n in range(number)]


def run(found: list[Request], **config: object) -> tuple[Plant, list[RequestOutcome]]:
    ids = count()
    policy = Policy(PolicyConfig(**config), lambda: f"i{next(ids)}", 1000.0)  # type: ignore[arg-type]
    plant = Plant(policy, FLEET, [SMALL, LARGE])
    return plant, plant.run(sorted(found, key=lambda request: request.arrives_at))


def test_every_request_ends_and_nothing_stays_bound() -> None:
    found = requests("t/small", 200, 0.05) + requests("t/large", 40, 0.3)
    plant, outcomes = run(found)
    assert len(outcomes) == len(found)
    for each in outcomes:
        assert each.ended_at > each.first_token_at > each.request.arrives_at and not each.is_refused
        decode_s = (each.request.num_output_tokens - 1) * 0.003
        assert each.ended_at - each.first_token_at >= decode_s, "no token comes faster than the device reads"
    policy = plant.policy
    assert isinstance(policy, Policy)
    assert len(policy.state.attempts) == 0 and len(policy.state.queues) == 0
    policy.state.attempts.check_integrity({})


def test_prompts_behind_a_worker_that_has_become_slow_are_taken_back_and_begin_elsewhere() -> None:
    class CountingPolicy(Policy):
        """Of workers of which every second prefers to decode."""

        num_taken_back = 0
        preferred: dict[str, Role]

        def apply(self, input_: Input, now: float) -> Effects:
            if isinstance(input_, WorkerReported):
                worker = input_.worker
                role = self.preferred.setdefault(worker.worker_id, tuple(Role)[len(self.preferred) % 2])
                input_ = msgspec.structs.replace(input_, worker=replace(worker, preferred_role=role))
            caused = super().apply(input_, now)
            self.num_taken_back += sum(isinstance(answer, TakeBack) for answer in caused.answers)
            return caused

    sixteen_s = 16 * 0.03  # several at once: prompts that come one by one find idle instances
    bursts = [
        replace(one, arrives_at=one.arrives_at // sixteen_s * sixteen_s)
        for one in requests("t/small", 1200, 0.03, 600, 4)
    ]

    def run_with(gain_s: float) -> tuple[CountingPolicy, list[RequestOutcome]]:
        ids = count()
        config = PolicyConfig(take_back_gain_s=gain_s)
        policy = CountingPolicy(config, lambda: f"i{next(ids)}", 1000.0)
        policy.preferred = {}
        plant = Plant(policy, FLEET, [SMALL])

        def slow_down() -> None:
            engines = [worker.engine for worker in plant.workers.values() if Role.PREFILL in worker.slot.roles]
            assert len(engines) > 1 and engines[0] is not None
            engines[0].latency = replace(SMALL.latency, prefill=replace(SMALL.latency.prefill, base_s=6.0))

        plant.events.at(1000.0 + 5.0 + 20.0, slow_down)
        return policy, plant.run(bursts)

    policy, outcomes = run_with(0.5)
    assert all(each.ended_at and not each.is_refused for each in outcomes)
    assert 0 < policy.num_taken_back <= 20
    never, as_bound = run_with(math.inf)
    assert never.num_taken_back == 0
    late = [sum(each.ttft_s > 2.0 for each in found[600:]) for found in (outcomes, as_bound)]
    assert late[0] < late[1]


def test_answers_leave_an_instance_that_drains_and_end_elsewhere_with_all_their_tokens() -> None:
    class DrainingPolicy(Policy):
        """Drains one of two decode instances at 1010 s."""

        drained = ""
        freed_at = math.inf
        num_moved = 0

        def apply(self, input_: Input, now: float) -> Effects:
            caused = super().apply(input_, now)
            self.num_moved += isinstance(input_, Release) and input_.is_migrated
            decoding = [one for one in self.state.instances if one.plays(Role.DECODE) and one.placeable]
            if now > 1010.0 and not self.drained and len(decoding) > 1:
                unload = UnloadCommand(decoding[0].instance_id, decoding[0].worker_id, 60.0)
                caused = replace(caused, commands=[*caused.commands, unload])
                self.drained = decoding[0].instance_id
            elif self.drained and math.isinf(self.freed_at) and self.state.instances.get(self.drained) is None:
                self.freed_at = now
            return caused

    def run_with(gain_s: float) -> tuple[DrainingPolicy, list[RequestOutcome]]:
        ids = count()
        config = PolicyConfig(drain_s=60.0, migration_gain_s=gain_s)
        strategies = Strategies(decide=StaticInstances([(policy_model(SMALL), 1, 2)], num_workers=10))
        policy = DrainingPolicy(config, lambda: f"i{next(ids)}", 1000.0, strategies)
        return policy, Plant(policy, FLEET, [SMALL]).run(requests("t/small", 20, 0.01, 1000, 5000))

    (policy, outcomes), (never, as_placed) = run_with(0.5), run_with(math.inf)
    assert 8 <= policy.num_moved <= 12 and never.num_moved == 0
    assert policy.freed_at < 1013.0 < 1020.0 < never.freed_at
    for moved, unmoved in zip(outcomes, as_placed, strict=True):
        assert moved.ended_at and not moved.is_refused
        assert moved.ended_at - unmoved.ended_at < 10.0, "of 80 s: a batch of twenty is slower than one of ten"
        steps_s = (moved.request.num_output_tokens - 1) * 0.003
        assert moved.ended_at - moved.first_token_at >= steps_s, "no token is given twice or left out"
    assert len(policy.state.attempts) == len(policy.state.queues) == 0
    policy.state.attempts.check_integrity({})


def test_a_cold_start_takes_what_the_disk_takes_and_a_second_copy_what_the_network_takes() -> None:
    plant, (first, *_) = run(requests("t/small", 1, 1.0))
    disk_s = SMALL.pack_bytes / FLEET.disk_bytes_per_s
    assert first.ttft_s == pytest.approx(disk_s, rel=0.05)
    assert plant.spent.num_loads == 1, "one slot plays both roles"


def test_a_model_without_requests_holds_no_device() -> None:
    plant, _ = run(requests("t/small", 3, 0.1), idle_timeout_s=2.0)
    plant.events.run(plant.events.now + 10.0)
    assert all(worker.slot.instance_id == "" for worker in plant.workers.values())
    before = plant.spent_now().device_s
    plant.events.run(plant.events.now + 100.0)
    assert plant.spent_now().device_s == before


def test_a_model_of_four_devices_gets_a_slot_of_four() -> None:
    plant, _ = run(requests("t/large", 1, 1.0), idle_timeout_s=1e9)
    held = [worker for worker in plant.workers.values() if worker.slot.model == "t/large"]
    assert held and all(worker.num_devices == 4 for worker in held)


def test_a_draining_worker_is_free_once_its_last_attempt_has_failed_elsewhere() -> None:
    """It was free only when its own drain ended: it cost devices that served nobody."""
    held: list[str] = []

    class DrainingPolicy(Policy):
        """Ends all drains of instances that prefill at once, and those of others never."""

        def apply(self, input_: Input, now: float) -> Effects:
            caused = super().apply(input_, now)
            if isinstance(input_, Tick) and now > 1006.0 and not held:
                for one in self.state.instances:
                    held.append(one.instance_id)
                    drain_s = 0.0 if one.plays(Role.PREFILL) else 1e6
                    caused.commands.append(UnloadCommand(one.instance_id, one.worker_id, drain_s))
            return caused

    ids = count()
    plant = Plant(DrainingPolicy(PolicyConfig(), lambda: f"i{next(ids)}", 1000.0, APART), FLEET, [SMALL])
    (outcome,) = plant.run(requests("t/small", 1, 1.0, num_prompt=120_000))
    assert len(held) == 2 and outcome.num_attempts > 1
    assert not {worker.slot.instance_id for worker in plant.workers.values()} & set(held)


def test_a_first_token_that_was_given_is_not_given_again() -> None:
    """Given while the KV was still on its way, it did not count when the attempt failed."""
    forced: list[int] = []

    class KillingPolicy(Policy):
        """Ends all drains at once when the first token is there."""

        def apply(self, input_: Input, now: float) -> Effects:
            caused = super().apply(input_, now)
            if isinstance(input_, Admit):
                forced.append(input_.admission.num_forced_tokens)
            if isinstance(input_, FirstToken) and len(forced) == 1:
                caused.commands.extend(
                    UnloadCommand(one.instance_id, one.worker_id, 0.0) for one in self.state.instances
                )
            return caused

    ids = count()
    plant = Plant(KillingPolicy(PolicyConfig(), lambda: f"i{next(ids)}", 1000.0, APART), FLEET, [SMALL])
    plant.run(requests("t/small", 1, 1.0, num_prompt=20_000))
    assert forced[0] == 0 and set(forced[1:]) == {1}


def test_the_length_of_an_answer_is_not_told() -> None:
    """``max_tokens`` was that length: KV and times per token were predicted exactly."""
    asked: dict[str, int] = {}

    class RecordedPolicy(Policy):
        def apply(self, input_: Input, now: float) -> Effects:
            if isinstance(input_, Admit):
                asked[input_.admission.key.request_id] = input_.admission.max_tokens
            return super().apply(input_, now)

    ids = count()
    plant = Plant(RecordedPolicy(PolicyConfig(), lambda: f"i{next(ids)}", 1000.0), FLEET, [SMALL])
    lengths = [1, 50, 512, 513, 3000]
    plant.run([Request(str(n), 0.1, "t/small", 100, n) for n in lengths])
    assert [asked[str(n)] for n in lengths] == [512, 512, 512, 1024, 4096]


def test_one_event_stands_for_what_is_due() -> None:
    dues: list[float] = []

    class RecordedPolicy(Policy):
        def apply(self, input_: Input, now: float) -> Effects:
            if isinstance(input_, Due):
                dues.append(now)
            return super().apply(input_, now)

    ids = count()
    plant = Plant(RecordedPolicy(PolicyConfig(), lambda: f"i{next(ids)}", 1000.0), FLEET, [SMALL])
    plant.run(requests("t/small", 300, 0.01, num_prompt=4000))
    assert dues and len(set(dues)) == len(dues)


def test_the_same_requests_give_the_same_run() -> None:
    found = requests("t/small", 50, 0.07)
    assert [each.ended_at for each in run(found)[1]] == [each.ended_at for each in run(found)[1]]


def test_tenants_with_the_same_files_share_an_instance_and_its_time() -> None:
    many = [replace(one, tenant="a", request_id=f"a{n}") for n, one in enumerate(requests("t/small", 100, 0.001, 8000))]
    few = [replace(one, tenant="b", request_id=f"b{n}") for n, one in enumerate(requests("t/small", 3, 1.0, 8000))]
    plant, outcomes = run(many + few, max_instances=1)
    of = {tenant: [each.ttft_s for each in outcomes if each.request.tenant == tenant] for tenant in "ab"}
    assert plant.spent.num_loads == 1, "for both"
    assert max(of["b"]) < max(of["a"]) / 4


def test_batch_work_waits_for_the_others() -> None:
    batch = [
        replace(one, request_id=f"b{n}", service_class=ServiceClass.BATCH)
        for n, one in enumerate(requests("t/small", 40, 0.001, 8000))
    ]
    others = [replace(one, arrives_at=0.1 + one.arrives_at) for one in requests("t/small", 10, 0.001, 8000)]
    _, outcomes = run(batch + others, max_instances=1)
    first = {each.request.request_id: each.first_token_at for each in outcomes}
    last = max(first[one.request_id] for one in others)
    assert sum(first[one.request_id] > last for one in batch) > 30


def test_what_is_held_at_the_start_is_kept_as_an_earlier_scheduler_would_have_it() -> None:
    """Packs that were not used yet were evicted for second copies of others, and came back from disks."""
    ids = count()
    policy = Policy(PolicyConfig(), lambda: f"i{next(ids)}", 1000.0)
    plant = Plant(policy, replace(FLEET, arena_bytes=LARGE.pack_bytes), [SMALL, LARGE], held={0: ["t/large"]})
    _, *outcomes = plant.run([*requests("t/small", 40, 1.0), Request("last", 45.0, "t/large", 1000, 50)], 10.0)
    assert outcomes[-1].ttft_s < LARGE.pack_bytes / FLEET.disk_bytes_per_s / 2


def test_of_three_times_as_many_prompts_as_can_be_computed_most_of_a_third_is_in_time_and_all_end() -> None:
    computed_per_s = 15e3 / 2000
    found = requests("t/small", round(3 * computed_per_s * 30), 1 / (3 * computed_per_s), 2000, 30)
    _, outcomes = run(found, max_instances=1)
    in_time = [one for one in outcomes if one.arrived_at > outcomes[0].arrived_at + 5.0 and one.attains(SMALL)]
    assert len(in_time) / (25 * computed_per_s) >= 0.6, "a sixteenth is for those that are late, a tenth for answers"
    assert all(one.ended_at for one in outcomes)


def test_in_an_overload_of_unlike_prompts_more_are_in_time_than_by_deadlines_alone() -> None:
    """The example of docs/scheduling.md."""
    model = replace(SMALL, ttft_base_s=2.0, ttft_prompt_factor=0.0)
    rng, at, found = random.Random(1), 0.0, list[Request]()
    while (at := at + rng.expovariate(22.0)) < 60.0:
        found.append(Request(f"r{len(found)}", at, model.name, rng.randint(500, 3500), 4))

    def served(strategies: Strategies) -> tuple[float, float]:
        """The parts in time, and late but before the last arrival."""
        ids = count()
        policy = Policy(PolicyConfig(max_instances=1), lambda: f"i{next(ids)}", 1000.0, strategies)
        outcomes = Plant(policy, FLEET, [model]).run(found, 30.0)
        in_time = sum(one.ttft_s <= 2.0 for one in outcomes)
        early = sum(one.first_token_at < outcomes[-1].arrived_at for one in outcomes)
        return in_time / len(outcomes), (early - in_time) / len(outcomes)

    in_time, late = served(Strategies())
    by_deadlines, _ = served(by_deadline(Strategies()))
    assert (round(in_time, 2), round(late, 3), round(by_deadlines, 2)) == (0.38, 0.023, 0.29)
