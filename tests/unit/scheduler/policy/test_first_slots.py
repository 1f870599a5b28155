"""A tenant without a slot against a tenant that floods all slots: how long its requests wait, and what they disturb."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.policy.paper_cluster import a_model, a_store, a_worker
from tests.unit.scheduler.policy.running_cluster import SERVED, Call, RunningCluster
from torchrelay.scheduler.policy.config import PolicyConfig

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
        before = len([event for event in cluster.events if event.kind == "first_slot"])
        flood(cluster, 0.1, 2)
        taken_at.append(len([event for event in cluster.events if event.kind == "first_slot"]) - before)
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


def test_answers_of_taken_slot_go_on_in_next_slot() -> None:
    cluster = flooded()
    flood(cluster, 20.0)
    cluster.call("lone", LONE, decode_s=0.1)
    flood(cluster, 60.0)
    assert "first_slot" in cluster.kinds()
    ended = {call.end for call in cluster.calls.values()}
    assert ended == {"", SERVED}, ended
