"""Models, workers and tenants that misbehave, each alone: how it ends, after how long, and what is told of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.unit.scheduler.policy.paper_cluster import a_model, a_store, a_worker
from tests.unit.scheduler.policy.running_cluster import CONFIG, SERVED, Call, Fault, RunningCluster
from torchrelay.scheduler.policy.autoscaling.actions import FIRST_SLOT
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.types import InstancePhase, Model, Role

MODEL = a_model()


def a_cluster(num_workers: int, config: PolicyConfig = CONFIG, load_s: float = 1.0) -> RunningCluster:
    """Slots of one host that play both roles."""
    cluster = RunningCluster(config, load_s=load_s)
    cluster.settle(a_store("s", "host-0"), *(a_worker(f"w{n}", "host-0") for n in range(num_workers)))
    return cluster


def pass_until_all_have_ended(cluster: RunningCluster, within_s: float) -> None:
    end = cluster.now + within_s
    while cluster.open_calls and cluster.now < end:
        cluster.step()
    cluster.check_calls()
    assert not cluster.open_calls, cluster.open_calls


def told(cluster: RunningCluster, model: Model) -> str:
    """The output of ``torchrelay explain MODEL``."""
    return "\n".join(f"{event.kind}: {event.reason}" for event in cluster.explain.model(model.name))


def turns_of(cluster: RunningCluster) -> list[str]:
    """Which models became ready, in order."""
    return [event.model for event in cluster.told("ready")]


@pytest.mark.parametrize(
    ("num_others", "longest_wait_s"),
    [(12, CONFIG.longest_wait_s), (1, CONFIG.time_slice_s)],
    ids=["worth it", "overdue"],
)
def test_freed_slot_goes_to_waiting_model(num_others: int, longest_wait_s: float) -> None:
    """The model with the oldest request got it: the model with the long queue was loaded again at once, for nothing,
    until all of its older requests had been served.
    """
    cluster = a_cluster(1, replace(CONFIG, longest_wait_s=longest_wait_s))
    crowded, other = a_model("acme/crowded"), a_model("acme/other")
    for number in range(12):
        cluster.call(f"c{number}", crowded, num_tokens=1500)
    others = [cluster.call(f"o{number}", other) for number in range(num_others)]
    pass_until_all_have_ended(cluster, 40.0)
    assert turns_of(cluster)[:3] == [crowded.name, other.name, crowded.name]
    assert all(call.end == SERVED for call in others)
    assert all(call.ended_at - call.arrived_at < 2 * (CONFIG.time_slice_s + CONFIG.drain_s) for call in others)
    assert "acme/other has waited" in told(cluster, crowded)


def test_many_models_of_a_tenant_end_one_turn_of_others_per_turn() -> None:
    """Six with a single request each took all slots at once, from models with four requests per second each."""
    config = replace(CONFIG, longest_wait_s=6.0)
    cluster = a_cluster(3, config, load_s=0.2)
    popular = [a_model(f"birch/{number}") for number in range(3)]
    calls: list[Call] = []
    for number in range(100):
        for model in popular:
            cluster.call(f"{model.name} {number}", model, num_tokens=10, decode_s=1.0)
        if number == 20:
            calls = [cluster.call(f"r{rare}", a_model(f"acme/{rare}"), 10, decode_s=5.0) for rare in range(6)]
        cluster.pass_time(0.25)
    cluster.check_calls()
    kinds = ("time_slice", FIRST_SLOT)
    turns = [event for event in cluster.events if event.kind in kinds and event.model.startswith("birch/")]
    ended = [event.at for event in turns if event.reason.startswith("a model of another tenant")]
    assert len(ended) > 1 and all(later - earlier >= config.time_slice_s for earlier, later in pairwise(ended)), ended
    for number, first_token_s in enumerate(sorted(call.first_token_s for call in calls)):
        assert first_token_s < config.longest_wait_s + (number + 1) * config.time_slice_s


def test_alternating_models_wait_at_most_two_reloads() -> None:
    """The hysteresis of a slot: who waits takes it when it gains as much as the other would lose while it is away."""
    cluster = a_cluster(1, replace(CONFIG, map_bytes_per_s=32e6))  # a reload takes about as long as a load
    models = [a_model("acme/one"), a_model("acme/other")]
    for number in range(40):
        cluster.call(f"r{number}", models[number % 2], decode_s=0.1)
        cluster.pass_time(0.7)
    pass_until_all_have_ended(cluster, 20.0)
    *calls, last = (
        cluster.calls.values()
    )  # after which no request makes the bid higher: it waits until the slot is idle
    assert max(call.first_token_s for call in calls) <= 3 * cluster.load_s + 1e-6
    assert last.first_token_s <= 2 * cluster.load_s + cluster.config.idle_timeout_s
    assert len(turns_of(cluster)) <= len(cluster.calls) / 2
    assert "to load it again takes" in told(cluster, models[0])


def test_broken_worker_does_not_block_pairs_for_ever() -> None:
    """Prefill was loaded there, and decode beside it: before that was given up, the other model's turn had come, and so
    on. Nobody was ever served, although one slot could play both roles.
    """
    cluster = RunningCluster(load_s=0.5, tokens_per_s=8000.0)
    cluster.settle(a_store("s", "h"), a_worker("bad", "h", frozenset((Role.PREFILL,))), a_worker("well", "h"))
    cluster.faults["bad"] = Fault.NEVER_LOADS
    models = [a_model("acme/one"), a_model("acme/other")]
    for number in range(24):
        cluster.call(f"r{number}", models[number % 2], decode_s=0.3)
    pass_until_all_have_ended(cluster, 59.0)
    assert all(call.end == SERVED for call in cluster.calls.values()), list(cluster.calls.values())


@pytest.mark.parametrize(
    ("fault", "num_tokens", "num_at_once"), [(Fault.SLOW, 200, 1), (Fault.IDLE_LIAR, 200, 1), (Fault.IDLE_LIAR, 10, 4)]
)
def test_lying_worker_is_avoided_within_twenty_requests(fault: Fault, num_tokens: int, num_at_once: int) -> None:
    """Dozens of short prompts, which fill no step, were dispatched to a worker that computes too slowly or nothing."""
    cluster = a_cluster(4)
    for number in range(12):
        cluster.call(f"warm{number}", MODEL, num_tokens=1000)
    cluster.pass_time(7.0)
    ready = [worker for worker in cluster.workers.values() if worker.slot.phase is InstancePhase.READY]
    prefills = [worker.worker_id for worker in ready if 1 in worker.slot.roles]
    assert len(prefills) == 2
    liar = prefills[0]
    cluster.faults[liar] = fault
    for number in range(200):
        cluster.call(f"r{number}", MODEL, num_tokens=num_tokens, decode_s=0.3)
        if number % num_at_once == 0:
            cluster.pass_time(0.2)
    pass_until_all_have_ended(cluster, 61.0)
    cluster.pass_time(1.0)
    calls = [call for call in cluster.calls.values() if call.name.startswith("r")]
    at_liar = [call for call in calls if call.was_at(liar)]
    assert len(at_liar) <= 20, len(at_liar)
    ends = Counter(call.end.partition(":")[0] for call in calls)
    assert ends[SERVED] >= 180, ends
    slow = [call for call in calls if call.end == SERVED and call.first_token_s > 4.0]
    assert len(slow) <= 5, slow


LOAD_S = 1.0
LONE = a_model("birch/lone")


def flooded(num_slots: int = 2, num_models: int = 3, decode_s: float = 16.0) -> RunningCluster:
    """A cluster with the platform's own times, all of whose slots a tenant uses for long answers."""
    cluster = RunningCluster(PolicyConfig(), load_s=LOAD_S)
    cluster.settle(a_store("s", "host-0"), *(a_worker(f"w{n}", "host-0") for n in range(num_slots)))
    flood(cluster, 0.0, num_models, decode_s)
    return cluster


def flood(cluster: RunningCluster, seconds: float, num_models: int = 3, decode_s: float = 16.0) -> None:
    """Passes the time while 13 callers per model of the tenant have a request each at any time."""
    end = cluster.now + seconds
    while True:
        for number in range(num_models):
            model = a_model(f"acme/m{number}")
            num_open = sum(call.model == model for call in cluster.open_calls)
            for _ in range(13 - num_open):
                cluster.call(f"{model.name} {len(cluster.calls)}", model, decode_s=decode_s)
        if cluster.now >= end:
            return
        cluster.step()


@pytest.mark.parametrize("after_s", [5.0, 13.0, 18.0, 31.0, 44.0])
def test_lone_request_waits_for_a_load_and_a_few_seconds(after_s: float) -> None:
    """It waited for a minute, and then until all answers of a slot had ended."""
    cluster = flooded()
    flood(cluster, after_s)
    call = cluster.call("lone", LONE, decode_s=0.1)
    flood(cluster, 30.0)
    assert call.end == SERVED and call.first_token_s <= LOAD_S + 5.0, call.first_token_s


def test_single_requests_of_tenant_move_slots_once_per_turn() -> None:
    cluster = flooded()
    flood(cluster, 20.0)
    calls: list[Call] = []
    for number in range(12):
        calls.append(cluster.call(f"lone {number}", LONE, decode_s=0.1))
        flood(cluster, 4.0)
    assert max(call.first_token_s for call in calls) <= LOAD_S + 5.0, [call.first_token_s for call in calls]
    loads = [event for event in cluster.events if event.kind == "ready" and event.model == LONE.name]
    assert len(loads) <= 12 * 4.0 / cluster.config.time_slice_s, len(loads)


def test_two_tenants_without_a_slot_leave_the_third_one() -> None:
    """Both took a slot of the same tenant in one decision."""
    cluster = flooded(num_models=2)
    flood(cluster, 20.0, 2)
    calls = [
        cluster.call(f"lone {n}", a_model(f"{tenant}/lone"), decode_s=0.1)
        for n, tenant in enumerate(("birch", "cedar"))
    ]
    taken_at = []
    for _ in range(40):
        before = len(cluster.told("first_slot"))
        flood(cluster, 0.1, 2)
        taken_at.append(len(cluster.told("first_slot")) - before)
    assert max(taken_at) == 1, taken_at
    flood(cluster, 20.0, 2)
    assert [call.end for call in calls] == [SERVED] * 2


def test_tenants_with_a_slot_each_take_none_from_each_other() -> None:
    cluster = flooded(num_models=1)
    cluster.call("lone", LONE, decode_s=40.0)
    flood(cluster, 3.0, 1)
    cluster.call("third", a_model("cedar/third"), decode_s=0.1)
    flood(cluster, 8.0, 1)
    assert "first_slot" not in cluster.kinds()
