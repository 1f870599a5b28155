"""The scheduler's own policy on a simulated cluster."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import count, pairwise
from typing import Any, TypeVar

import pytest

from bench.rivals.deadline_order import by_deadline
from bench.rivals.distserve import StaticInstances
from torchrelay.scheduler.policy.autoscaling.view import cover_both_roles
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.effects import Effects, SetRolesCommand, UnloadCommand
from torchrelay.scheduler.policy.inputs import Admit, FirstToken, Input, Tick
from torchrelay.scheduler.policy.policy import Policy
from torchrelay.scheduler.policy.strategies import Strategies
from torchrelay.scheduler.policy.types import InstancePhase, Role, Roles, ServiceClass
from torchrelay.sim.fleets import served_model
from torchrelay.sim.plant import Plant, policy_model
from torchrelay.sim.scenario import Fleet, Request, RequestOutcome

SMALL = served_model("t/small", 1, 8, 32, 131072, 0.45, 15e3, 0.1)
LARGE = served_model("t/large", 4, 72, 80, 327680, 1.25, 5.3e3, 0.2)
FLEET = Fleet(2, (4, 1, 1, 1, 1), 12.5e9, 25e9, 2.5e9, 480 * 10**9)
PolicyT = TypeVar("PolicyT", bound=Policy)
APART = Strategies(decide=StaticInstances([(policy_model(SMALL), 1, 1)], num_workers=10))  # prefill and decode


def requests(model: str, number: int, every_s: float, num_prompt: int = 1000, num_output: int = 50) -> list[Request]:
    return [Request(f"{model} {n}", n * every_s, model, num_prompt, num_output) for n in range(number)]


class RecordedPolicy(Policy):
    """Notes its inputs, and when they came."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.inputs: list[tuple[float, Input]] = []

    def apply(self, input_: Input, now: float) -> Effects:
        self.inputs.append((now, input_))
        return super().apply(input_, now)


def new_policy(policy: type[PolicyT], strategies: Strategies | None = None, **config: object) -> PolicyT:
    ids = count()
    return policy(PolicyConfig(**config), lambda: f"i{next(ids)}", 1000.0, strategies or Strategies())  # type: ignore[arg-type]


def run(requests: list[Request], **config: object) -> tuple[Plant, list[RequestOutcome]]:
    plant = Plant(new_policy(Policy, None, **config), FLEET, [SMALL, LARGE])
    return plant, plant.run(sorted(requests, key=lambda request: request.arrives_at))


def run_small(policy: Policy, requests: list[Request]) -> tuple[Plant, list[RequestOutcome]]:
    plant = Plant(policy, FLEET, [SMALL])
    return plant, plant.run(requests)


def assert_nothing_left(policy: object) -> None:
    assert isinstance(policy, Policy)
    assert len(policy.state.attempts) == len(policy.state.queues) == 0
    policy.state.attempts.check_integrity({})


def test_every_request_ends_and_frees_its_slot() -> None:
    both = requests("t/small", 200, 0.05) + requests("t/large", 40, 0.3)
    plant, outcomes = run(both)
    assert len(outcomes) == len(both)
    for outcome in outcomes:
        assert outcome.ended_at > outcome.first_token_at > outcome.request.arrives_at and not outcome.is_refused
        decode_s = (outcome.request.num_output_tokens - 1) * 0.003
        assert outcome.ended_at - outcome.first_token_at >= decode_s, "no token is faster than the device reads"
    assert_nothing_left(plant.policy)


@pytest.mark.parametrize("phase_s", [4.0, 20.0])
def test_roles_follow_demand_but_not_faster_than_a_turn(phase_s: float) -> None:
    """Long prompts and long answers take turns on four slots."""

    class RolesPolicy(Policy):
        """Notes role changes, and that the model never lacks a role."""

        has_served = False

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.changes: list[tuple[float, Roles]] = []

        def apply(self, input_: Input, now: float) -> Effects:
            caused = super().apply(input_, now)
            self.changes.extend((now, each.roles) for each in caused.commands if isinstance(each, SetRolesCommand))
            is_served = cover_both_roles(each for each in self.state.instances if each.phase is InstancePhase.READY)
            assert is_served or not self.has_served
            self.has_served |= is_served
            return caused

    prompts = requests("t/small", int(phase_s / 0.15), 0.15, 4000, 2)
    answers = requests("t/small", int(phase_s / 0.1), 0.1, 50, 1200)
    phases = [
        replace(request, request_id=f"{turn} {request.request_id}", arrives_at=phase_s * turn + request.arrives_at)
        for turn in range(int(80 / phase_s))
        for request in (prompts if turn % 2 else answers)
    ]
    policy = new_policy(RolesPolicy)
    apart = {f"worker-0-{place}": tuple(Role)[place % 2] for place in range(4)}
    plant = Plant(policy, replace(FLEET, num_hosts=1, groups=(1, 1, 1, 1)), [SMALL], preferred_roles=apart)
    outcomes = plant.run(phases)
    assert all(outcome.ended_at and not outcome.is_refused for outcome in outcomes)
    assert plant.spent_now().num_loads == 4
    gaps_s = [later - earlier for (earlier, _), (later, _) in pairwise(policy.changes)]
    assert all(gap_s >= policy.state.config.time_slice_s for gap_s in gaps_s)
    changed_to = {roles for _, roles in policy.changes}
    both = {frozenset((role,)) for role in Role}
    assert changed_to == both if phase_s > policy.state.config.time_slice_s else changed_to <= both
    plant.events.run(plant.events.now + 1.0)  # until the release of the last request has arrived
    assert_nothing_left(policy)


def test_cold_start_takes_disk_time() -> None:
    plant, (first, *_) = run(requests("t/small", 1, 1.0))
    disk_s = SMALL.pack_bytes / FLEET.disk_bytes_per_s
    assert first.ttft_s == pytest.approx(disk_s, rel=0.05)
    assert plant.spent_now().num_loads == 1, "one slot plays both roles"


def test_model_without_requests_holds_no_device() -> None:
    plant, _ = run(requests("t/small", 3, 0.1), idle_timeout_s=2.0)
    plant.events.run(plant.events.now + 10.0)
    assert all(worker.slot.instance_id == "" for worker in plant.workers.values())
    before = plant.spent_now().device_s
    plant.events.run(plant.events.now + 100.0)
    assert plant.spent_now().device_s == before


def test_model_of_four_devices_gets_slot_of_four() -> None:
    plant, _ = run(requests("t/large", 1, 1.0), idle_timeout_s=1e9)
    held = [worker for worker in plant.workers.values() if worker.slot.model == "t/large"]
    assert held and all(worker.num_devices == 4 for worker in held)


def test_draining_worker_free_after_last_attempt_failed() -> None:
    """Regression: it was free only at the end of its drain and held devices without serving."""
    held: list[str] = []

    class DrainingPolicy(Policy):
        """Drains prefill instances immediately and other instances without end."""

        def apply(self, input_: Input, now: float) -> Effects:
            caused = super().apply(input_, now)
            if isinstance(input_, Tick) and now > 1006.0 and not held:
                for each in self.state.instances:
                    held.append(each.instance_id)
                    drain_s = 0.0 if each.plays(Role.PREFILL) else 1e6
                    caused.commands.append(UnloadCommand(each.instance_id, each.worker_id, drain_s))
            return caused

    plant, (outcome,) = run_small(new_policy(DrainingPolicy, APART), requests("t/small", 1, 1.0, num_prompt=120_000))
    assert len(held) == 2 and outcome.num_attempts > 1
    assert not {worker.slot.instance_id for worker in plant.workers.values()} & set(held)


def test_first_token_counts_after_failure() -> None:
    """Regression: a first token did not count if the attempt failed while its KV was in transit."""

    class KillingPolicy(RecordedPolicy):
        """Drains all instances immediately at the first token."""

        def apply(self, input_: Input, now: float) -> Effects:
            caused = super().apply(input_, now)
            if isinstance(input_, FirstToken) and sum(isinstance(each, FirstToken) for _, each in self.inputs) == 1:
                drains = (UnloadCommand(each.instance_id, each.worker_id, 0.0) for each in self.state.instances)
                caused.commands.extend(drains)
            return caused

    policy = new_policy(KillingPolicy, APART)
    run_small(policy, requests("t/small", 1, 1.0, num_prompt=20_000))
    first, *later = (input_.admission.num_forced_tokens for _, input_ in policy.inputs if isinstance(input_, Admit))
    assert first == 0 and set(later) == {1}


def test_max_tokens_hides_answer_length() -> None:
    """Regression: ``max_tokens`` was the length, so KV and times per token were predicted exactly."""
    lengths, policy = [1, 50, 512, 513, 3000], new_policy(RecordedPolicy)
    run_small(policy, [Request(str(n), 0.1, "t/small", 100, n) for n in lengths])
    admissions = [input_.admission for _, input_ in policy.inputs if isinstance(input_, Admit)]
    asked = {admission.key.request_id: admission.max_tokens for admission in admissions}
    assert [asked[str(n)] for n in lengths] == [512, 512, 512, 1024, 4096]


def test_ticks_place_requests_round_and_turn_once_at_a_time() -> None:
    policy = new_policy(RecordedPolicy)
    run_small(policy, requests("t/small", 300, 0.01, num_prompt=4000))
    ticks = Counter(now for now, input_ in policy.inputs if isinstance(input_, Tick))
    assert 1 in ticks.values() and max(ticks.values()) <= 3


def test_tenants_with_same_files_share_instance() -> None:
    many = [
        replace(each, tenant="a", request_id=f"a{n}") for n, each in enumerate(requests("t/small", 100, 0.001, 8000))
    ]
    few = [replace(each, tenant="b", request_id=f"b{n}") for n, each in enumerate(requests("t/small", 3, 1.0, 8000))]
    plant, outcomes = run(many + few, max_instances=1)
    ttfts = {tenant: [each.ttft_s for each in outcomes if each.request.tenant == tenant] for tenant in "ab"}
    assert plant.spent_now().num_loads == 1, "for both tenants"
    assert max(ttfts["b"]) < max(ttfts["a"]) / 4


def test_batch_requests_wait_for_standard_ones() -> None:
    batch = [
        replace(request, request_id=f"b{n}", service_class=ServiceClass.BATCH)
        for n, request in enumerate(requests("t/small", 40, 0.001, 8000))
    ]
    others = [replace(each, arrives_at=0.1 + each.arrives_at) for each in requests("t/small", 10, 0.001, 8000)]
    _, outcomes = run(batch + others, max_instances=1)
    first = {each.request.request_id: each.first_token_at for each in outcomes}
    last = max(first[request.request_id] for request in others)
    assert sum(first[request.request_id] > last for request in batch) > 30


def test_warm_up_does_not_count() -> None:
    early, late = requests("t/small", 20, 0.5), requests("t/large", 5, 1.0)
    late = [replace(request, arrives_at=request.arrives_at + 30.0) for request in late]
    plant = Plant(new_policy(Policy, None, idle_timeout_s=2.0), FLEET, [SMALL, LARGE])
    outcomes = plant.run([*early, *late], warm_up_s=25.0)
    assert {outcome.request.model for outcome in outcomes} == {"t/large"}
    whole = Plant(new_policy(Policy, None, idle_timeout_s=2.0), FLEET, [SMALL, LARGE])
    assert len(whole.run([*early, *late])) == 25
    assert 15.9 <= plant.at_last_arrival.device_s <= 4 * 9.0, "four devices from 30 s on, and none before"
    assert plant.at_last_arrival.device_s < whole.at_last_arrival.device_s - 10.0


def test_slow_worker_takes_longer_than_it_reports() -> None:
    fleet = replace(FLEET, num_hosts=1, groups=(1,))
    ttfts = []
    for slowness in ({}, {"worker-0-0": 3.0}):
        plant = Plant(new_policy(Policy), fleet, [SMALL], held={0: ["t/small"]}, slowness=slowness)
        outcomes = plant.run(requests("t/small", 5, 4.0, num_prompt=3000))
        ttfts.append(outcomes[-1].ttft_s)
    assert ttfts[1] == pytest.approx(3 * ttfts[0], rel=0.05)


def test_worker_computes_shared_beginning_once() -> None:
    fleet = replace(FLEET, num_hosts=1, groups=(1,))
    alike = [
        replace(request, prefix="beginning", num_prefix_tokens=2944)
        for request in requests("t/small", 5, 4.0, num_prompt=3000)
    ]
    outcomes = Plant(new_policy(Policy), fleet, [SMALL], held={0: ["t/small"]}).run(alike)
    prompt_s = SMALL.latency.prefill_s(3000)
    assert outcomes[-1].ttft_s < 0.3 * prompt_s < outcomes[0].ttft_s


def test_packs_held_at_start_are_retained() -> None:
    """Regression: unused packs were evicted for second copies of others and had to come back from disk."""
    plant = Plant(
        new_policy(Policy), replace(FLEET, arena_bytes=LARGE.pack_bytes), [SMALL, LARGE], held={0: ["t/large"]}
    )
    _, *outcomes = plant.run([*requests("t/small", 40, 1.0), Request("last", 45.0, "t/large", 1000, 50)], 10.0)
    assert outcomes[-1].ttft_s < LARGE.pack_bytes / FLEET.disk_bytes_per_s / 2


def test_threefold_overload_most_of_capacity_in_time() -> None:
    computed_per_s = 15e3 / 2000
    overload = requests("t/small", round(3 * computed_per_s * 30), 1 / (3 * computed_per_s), 2000, 30)
    _, outcomes = run(overload, max_instances=1)
    in_time = [each for each in outcomes if each.arrived_at > outcomes[0].arrived_at + 5.0 and each.attains(SMALL)]
    assert len(in_time) / (25 * computed_per_s) >= 0.6, "a tenth is for answers"
    assert all(outcome.ended_at for outcome in outcomes)


def test_mixed_overload_beats_deadline_order() -> None:
    """The example of docs/scheduling.md."""
    model = replace(SMALL, ttft_base_s=2.0, ttft_prompt_factor=0.0)
    rng, at, overload = random.Random(1), 0.0, list[Request]()
    while (at := at + rng.expovariate(22.0)) < 60.0:
        overload.append(Request(f"r{len(overload)}", at, model.name, rng.randint(500, 3500), 4))

    def served(strategies: Strategies) -> tuple[float, float]:
        """Shares in time, and late but before the last arrival."""
        policy = new_policy(Policy, strategies, max_instances=1)
        outcomes = Plant(policy, FLEET, [model]).run(overload, 30.0)
        in_time = sum(outcome.ttft_s <= 2.0 for outcome in outcomes)
        late = [outcome for outcome in outcomes if outcome.ttft_s > 2.0]
        early = sum(outcome.first_token_at < outcomes[-1].arrived_at for outcome in late)
        return in_time / len(outcomes), early / len(outcomes)

    in_time, late = served(Strategies())
    by_deadlines, _ = served(by_deadline(Strategies()))
    assert (round(in_time, 2), round(late, 3), round(by_deadlines, 2)) == (0.41, 0.005, 0.32)


def test_minimum_is_loaded_without_request_and_stays() -> None:
    kept = replace(SMALL, min_instances=1)
    plant = Plant(new_policy(Policy, None, idle_timeout_s=2.0), FLEET, [kept, LARGE])
    plant.run(requests("t/large", 2, 20.0))
    assert [worker.slot.model for worker in plant.workers.values() if worker.slot.model == kept.name] == [kept.name]


def test_coarse_clock_gives_almost_the_same_figures() -> None:
    arrivals = requests("t/small", 40, 7.0)

    def run_with(is_coarse: bool) -> tuple[int, list[float], float]:
        policy = new_policy(RecordedPolicy)
        plant = Plant(policy, FLEET, [SMALL], is_coarse=is_coarse)
        outcomes = plant.run(arrivals)
        num_ticks = sum(isinstance(each, Tick) for _, each in policy.inputs)
        return num_ticks, [outcome.ttft_s for outcome in outcomes], plant.at_last_arrival.device_s

    (num_fine, fine, fine_s), (num_coarse, coarse, coarse_s) = run_with(False), run_with(True)
    assert num_coarse < num_fine / 4
    assert coarse == pytest.approx(fine, abs=0.05) and coarse_s == pytest.approx(fine_s, rel=0.02)
