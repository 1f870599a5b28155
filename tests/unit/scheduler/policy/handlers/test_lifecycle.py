"""Admissions: idempotent, in order of arrival, bounded, and tied to gateways that may disconnect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from tests.unit.scheduler.policy.paper_cluster import MB, PaperCluster, a_model, a_store, a_worker, one_host, two_hosts
from torchrelay.common.latency.latency_model import LatencyModel, StepCost
from torchrelay.scheduler.policy import versions
from torchrelay.scheduler.policy.inputs import Admit, FirstToken, GatewayChanged, Release, Withdraw
from torchrelay.scheduler.policy.prediction import UNPREDICTED, Outcome
from torchrelay.scheduler.policy.types import AttemptKey, LatencyTargets, Placement, ServiceClass

MODEL = a_model()


def correction_at(scene: PaperCluster, placement: Placement) -> float:
    """The correction of times to the first token at the prompt's instance."""
    instance = scene.policy.state.instances.get(placement.prefill.instance_id)
    assert instance is not None
    return instance.ttft_correction.factor(scene.now)


def test_each_refused_client_gets_time_of_its_own_place() -> None:
    scene = one_host(a_worker("w", kv_pool_bytes=MB), queue_limit=4)
    # The pool holds a single request; none of them becomes late, since late requests would be refused first.
    size: dict[str, Any] = {"num_prompt_tokens": 500, "max_tokens": 100, "ttft_target_s": 1000.0}
    scene.serve(MODEL, "r0", **size)
    for number in range(1, 5):
        scene.admit(MODEL, f"r{number}", **size)
    for number in range(4):
        scene.pass_time(3.0)
        scene.release(f"r{number}")
        scene.admit(MODEL, f"r{number + 5}", **size)
    told = []
    for name in ("x", "y", "z"):
        scene.admit(MODEL, name, **size)
        refusal = scene.refused(name)
        told.append(refusal.retry_after_s)
    assert told == pytest.approx([3.0, 6.0, 9.0])
    scene.pass_time(7.0)  # the last one is due in 2 s, and nothing became free meanwhile
    scene.admit(MODEL, "again", **size)
    refusal = scene.refused("again")
    assert refusal.retry_after_s == pytest.approx(2.0 + (9.0 + 7.0) / 3)


def test_model_targets_precede_scheduler_targets() -> None:
    scene = PaperCluster().settle(a_worker("w"), a_store("s1", "host-1"))
    model = replace(MODEL, targets=LatencyTargets(interactive_ttft_s=0.3, tbt_target_s=0.05))
    scene.admit(model, "soon", service_class=ServiceClass.INTERACTIVE)
    scene.admit(model, "plain")
    scene.serve(MODEL, "changed back", service_class=ServiceClass.INTERACTIVE)
    targets = {placed.key.request_id: (placed.ttft_target_s, placed.tbt_target_s) for placed in scene.opened}
    assert targets == {"soon": (0.3, 0.05), "plain": (2.0, 0.05), "changed back": (0.5, 0.1)}
    deadlines = {
        attempt.admission.key.request_id: attempt.admission.deadline
        for attempt in scene.policy.state.attempts.attempts()
    }
    assert deadlines["soon"] - deadlines["plain"] == pytest.approx(0.3 - 2.0)


def test_more_instances_are_wanted_sooner_for_a_shorter_target() -> None:
    def num_wanted(target_s: float) -> int:
        scene = one_host(*(a_worker(f"w{number}") for number in range(4)))
        model = replace(MODEL, targets=LatencyTargets(standard_ttft_s=target_s))
        for number in range(20):
            scene.admit(model, f"r{number}", num_prompt_tokens=500)
        scene.finish_loads()
        return len(list(scene.policy.state.instances))

    assert num_wanted(60.0) == 1 < num_wanted(0.5)


def test_lost_first_token_counts_with_repeated_admission() -> None:
    scene = two_hosts()
    scene.serve(MODEL, "cold")
    admission = scene.admit(MODEL, "r1")
    placement = scene.placed("r1")
    assert not placement.cold
    bound = scene.policy.state.attempts.work_of(placement.prefill.instance_id)
    assert admission.key in bound.prefills
    scene.apply(GatewayChanged("gateway-1", False))
    scene.apply(GatewayChanged("gateway-1", True))
    scene.now += 5.0
    scene.apply(Admit(admission, MODEL, placement, is_computed=True))
    assert admission.key not in bound.prefills
    assert correction_at(scene, placement) == 1.0, "when it came is not known"


def test_requests_of_absent_gateway_wait_until_grace_ends() -> None:
    scene = PaperCluster().settle()
    scene.admit(MODEL, "r1")
    scene.admit(MODEL, "r2")
    scene.apply(GatewayChanged("gateway-1", False))
    scene.settle(a_store("s1", "host-1"), a_worker("w"))
    assert scene.placement("r1") is None  # nobody could be told
    scene.apply(GatewayChanged("gateway-1", True))
    scene.admit(MODEL, "r1")
    assert scene.placement("r1") is not None
    scene.pass_time(scene.config.gateway_grace_s + 0.2)
    assert len(scene.policy.state.queues) == 0  # r2 was not asked for again
    assert len(scene.policy.state.attempts) == 1


LATENCY = LatencyModel(StepCost(0.005, 1 / 15000, 0.0, 1000), StepCost(0.01, 1e-4, 0.0, 1000), token_budget=2048)


def test_cached_prompts_do_not_fill_instance() -> None:
    """Workers report whole prompts; what is dispatched here is predicted without the part that is cached."""
    model = a_model(routing_block_tokens=64, idle_timeout_s=600.0)
    worker = a_worker("w", latency=LATENCY, has_prefix_cache=True, kv_pool_bytes=1024 * MB)
    scene = one_host(worker)
    prompt: dict[str, Any] = {"num_prompt_tokens": 4000, "block_hashes": tuple(bytes([number]) for number in range(60))}
    scene.warm_up(model, **prompt)
    scene.pass_time(60.0, step_s=1.0)
    bound = 0
    while not (waiting := len(scene.policy.state.queues)):
        scene.admit(model, f"r{bound}", **prompt)
        bound += 1
    assert bound > 4 and waiting == 1 and scene.policy.state.placing_due - scene.now < 0.1


@pytest.mark.parametrize("is_worker_first", [True, False])
def test_prompts_of_earlier_scheduler_are_ahead(is_worker_first: bool) -> None:
    """Gateways tell of them without a prediction, before or after their workers report."""
    old = one_host(a_worker("w", latency=LATENCY, kv_pool_bytes=1024 * MB))
    old.warm_up(MODEL)
    first = old.admit(MODEL, "first", num_prompt_tokens=60 * LATENCY.token_budget)
    placement = structs.replace(old.placed("first"), predicted=UNPREDICTED)
    scene = PaperCluster(now=old.now)
    if is_worker_first:
        scene.settle(*old.stores.values(), *old.workers.values())
    due = scene.now + LATENCY.prefill_s(59 * LATENCY.token_budget)
    scene.apply(Admit(first, MODEL, placement))
    if not is_worker_first:
        scene.settle(*old.stores.values(), *old.workers.values())
    scene.admit(MODEL, "second")
    assert scene.placement("second") is None and scene.policy.state.placing_due == pytest.approx(due)
    scene.apply(FirstToken(first.key))
    assert scene.placed("second").predicted.ttft_s < 0.1
    assert correction_at(scene, placement) == 1.0


def test_new_model_is_known_if_all_others_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "MAX_VERSIONS", 2)
    scene = PaperCluster().settle()
    for number in range(3):
        scene.admit(a_model(f"acme/m{number}"), f"r{number}")
    assert len(scene.policy.state.queues) == len(list(scene.policy.state.versions)) == 3
    scene.apply(Withdraw(AttemptKey("r1", 1)))
    scene.admit(MODEL, "last")
    assert scene.policy.state.versions.get(a_model("acme/m1").version_id) is None


@pytest.mark.parametrize("other", ["", "birch/tiny"])
def test_few_prompts_are_bound_ahead_of_other_tenant(other: str) -> None:
    model = a_model(idle_timeout_s=600.0)
    scene = one_host(a_worker("w", latency=LATENCY, kv_pool_bytes=1024 * MB))
    scene.warm_up(model)
    scene.pass_time(10.0, step_s=1.0)
    if other:
        scene.admit(replace(model, name=other), "other", num_prompt_tokens=1)
        scene.release("other")
    for number in range(20):
        scene.admit(model, f"r{number}", num_prompt_tokens=1)
    assert sum(scene.placement(f"r{number}") is not None for number in range(20)) == (4 if other else 20)
    scene.apply(FirstToken(AttemptKey("r0", 1)))
    assert scene.placement("r4") is not None


@pytest.mark.parametrize(
    ("is_recalled", "again"),
    [
        (False, {"ttft_target_s": 0.01, "num_forced_tokens": 5}),
        (True, {"ttft_target_s": 0.01}),
        (False, {"age_s": 20.0}),
    ],
    ids=["its worker died after tokens", "it was recalled", "its worker died before tokens"],
)
def test_repeated_request_is_next_by_its_first_deadline(is_recalled: bool, again: dict[str, Any]) -> None:
    """It counted as late by then, and went behind all newcomers that could be in time yet."""
    scene = one_host(a_worker("w", latency=LATENCY))
    scene.warm_up(MODEL)
    full: dict[str, Any] = {"num_prompt_tokens": 2 * LATENCY.token_budget, "tbt_target_s": 10.0}
    if is_recalled:
        first = scene.admit(MODEL, "first", **full)
        scene.apply(Release(first.key, delivered=False, is_recalled=True))
    ahead = scene.admit(MODEL, "ahead", **full)
    scene.admit(MODEL, "newcomer", ttft_target_s=1000.0, **full)
    scene.admit(MODEL, "first", attempt=2, **full, **again)
    assert scene.placement("ahead") is not None
    assert scene.placement("newcomer") is None and scene.placement("first", attempt=2) is None
    scene.apply(FirstToken(ahead.key))
    assert scene.placement("first", attempt=2) is not None and scene.placement("newcomer") is None


@pytest.mark.parametrize("age_s", [0.0, 60.0])
def test_outage_of_scheduler_makes_no_request_late(age_s: float) -> None:
    """Requests that had waited for a scheduler bought an instance as soon as their prompts were computed."""
    scene = one_host(a_worker("w", latency=LATENCY))
    scene.serve(MODEL, "cold")
    scene.pass_time(1.0)
    scene.admit(MODEL, "r", age_s=age_s)
    scene.pass_time(0.1)
    scene.apply(FirstToken(AttemptKey("r", 1)))
    assert scene.policy.state.versions.of(MODEL.version_id).usage.num_late(0.0) == 0


@pytest.mark.parametrize("num_short", [1, 3])
def test_long_prompt_yields_only_if_not_all_are_in_time(num_short: int) -> None:
    scene = one_host(a_worker("w", latency=LATENCY, kv_pool_bytes=1024 * MB))
    scene.warm_up(MODEL)
    budget = LATENCY.token_budget
    full_s, long_s, short_s = (LATENCY.prefill_s(num) for num in (2 * budget, budget, budget // 2))
    scene.admit(MODEL, "ahead", num_prompt_tokens=2 * budget, tbt_target_s=10.0)
    target_s = full_s + long_s + 1.5 * short_s
    scene.admit(MODEL, "long", num_prompt_tokens=budget, ttft_target_s=target_s - 0.001, tbt_target_s=10.0)
    for number in range(num_short):
        scene.admit(MODEL, f"short{number}", num_prompt_tokens=budget // 2, ttft_target_s=target_s, tbt_target_s=10.0)
    scene.now += full_s
    scene.apply(FirstToken(AttemptKey("ahead", 1)))
    is_long_next = scene.placement("long") is not None
    assert is_long_next == (num_short == 1)
    assert (scene.placement("short0") is not None) == (num_short > 1)


def test_answers_in_flight_are_corrected_by_own_prediction() -> None:
    """The factor that had been learned since its placement was counted as part of its prediction."""
    scene = one_host(a_worker("w", latency=LATENCY))
    scene.serve(MODEL, "cold")
    scene.release("cold")
    factors, in_flight = [], list[Placement]()
    for number in range(300):
        scene.admit(MODEL, f"r{number}", tbt_target_s=10.0)
        scene.apply(FirstToken(AttemptKey(f"r{number}", 1)))
        placement = scene.placed(f"r{number}")
        in_flight.append(placement)
        factors.append(placement.predicted.tbt_correction)
        if len(in_flight) > 20:
            first = in_flight.pop(0)
            predicted = first.predicted
            outcome = Outcome(tbt_s=1.5 * predicted.tbt_s / predicted.tbt_correction, num_output_tokens=50)
            scene.apply(Release(first.key, True, outcome))
        scene.now += 0.05
    assert max(factors) < 1.51 and factors[-1] > 1.4
