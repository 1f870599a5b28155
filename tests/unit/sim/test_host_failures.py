"""The scheduler's policy in the simulator, whose hosts fail and return: what must hold holds after each input."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.scheduler.policy.invariants import CheckedPolicy, instances_of, placements_of, waiting_of
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.policy import Policy
from torchrelay.scheduler.policy.types import ServiceClass
from torchrelay.sim.fleets import served_model
from torchrelay.sim.plant import START_S, Plant
from torchrelay.sim.scenario import Fleet, Request

GB = 10**9
SMALL = served_model("acme/small", 1, 8, 32, 131072, 0.45, 15e3, 0.1)
OTHER = replace(SMALL, name="birch/other", ttft_base_s=1.0)
LARGE = served_model("acme/large", 2, 24, 40, 163840, 0.7, 12e3, 0.15)
KEPT = replace(SMALL, name="cedar/kept", min_instances=1)
MODELS = (SMALL, OTHER, LARGE, KEPT)
CONFIG = PolicyConfig(queue_limit=24, max_open_per_instance=16, idle_timeout_s=4.0, time_slice_s=3.0)

arrivals = st.tuples(
    st.floats(0.0, 12.0),  # when the first of some requests arrives
    st.sampled_from(MODELS),
    st.sampled_from(["", "birch", "dale"]),  # a tenant that uploaded the same files
    st.integers(1, 12),  # requests
    st.sampled_from([0.0, 0.02, 0.3]),  # between them
    st.sampled_from([1, 500, 4000]),  # tokens of each prompt
    st.sampled_from([1, 40, 400]),  # and of each answer
    st.sampled_from(ServiceClass),
)
outages = st.tuples(st.floats(0.0, 15.0), st.sampled_from([0.5, 6.0]), st.booleans())


def requests_of(some: list[tuple[float, object, str, int, float, int, int, ServiceClass]]) -> list[Request]:
    numbers = count()
    requests = [
        Request(f"r{next(numbers)}", at + number * gap_s, model.name, num_prompt, num_output, tenant, service_class)  # type: ignore[attr-defined]
        for at, model, tenant, num, gap_s, num_prompt, num_output, service_class in some
        for number in range(num)
    ]
    return sorted(requests, key=lambda request: request.arrives_at)


@settings(max_examples=12)
@given(
    some=st.lists(arrivals, min_size=1, max_size=6),
    groups=st.sampled_from([(2,), (2, 1), (2, 1, 1)]),
    arena_bytes=st.sampled_from([70 * GB, 480 * GB]),
    outages=st.lists(outages, min_size=1, max_size=3),
)
def test_requests_end_although_hosts_fail(
    some: list[tuple[float, object, str, int, float, int, int, ServiceClass]],
    groups: tuple[int, ...],
    arena_bytes: int,
    outages: list[tuple[float, float, bool]],
) -> None:
    """All are served, but for those that a full queue refuses; then all slots without a minimum become free."""
    ids = count()
    policy = CheckedPolicy(Policy(CONFIG, lambda: f"i{next(ids)}", START_S))
    plant = Plant(policy, Fleet(len(outages), groups, 12.5 * GB, 25 * GB, 2.5 * GB, arena_bytes), MODELS)
    for number, (at, away_s, is_noticed) in enumerate(outages):
        plant.events.at(START_S + 5.0 + at, partial(plant.fail_host, number, away_s, is_noticed=is_noticed))
    outcomes = plant.run(requests_of(some))
    assert all(outcome.ended_at or outcome.is_refused for outcome in outcomes)
    plant.events.run(plant.events.now + 60.0)
    assert not waiting_of(policy.state) and not placements_of(policy.state)
    assert {instance.version_id for instance in instances_of(policy.state)} <= {plant.models[KEPT.name].version_id}
