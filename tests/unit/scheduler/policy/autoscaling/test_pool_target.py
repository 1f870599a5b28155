"""The number of slots that a pool should have."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scheduler.policy.paper_cluster import a_model
from torchrelay.scheduler.policy.autoscaling.autoscaler_input import Demand
from torchrelay.scheduler.policy.autoscaling.pool_target import (
    PoolLoad,
    SlotShortage,
    missing_roles,
    num_missing_slots,
    pool_target,
)
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.types import ROLES, Role

UNLIMITED = PolicyConfig()


@pytest.mark.parametrize(
    ("load", "config", "expected", "reason"),
    [
        (PoolLoad(1), UNLIMITED, 0, "0 slots needed: 0 in use"),
        (PoolLoad(1, 4, 2), UNLIMITED, 2, "2 slots needed: 2 in use"),
        (
            PoolLoad(1, 4, 2, 1, (SlotShortage("acme/a", 1),)),
            UNLIMITED,
            2,
            "2 slots needed: 2 in use",
        ),
        (
            PoolLoad(1, 1, 1, 0, (SlotShortage("acme/a", 1), SlotShortage("acme/b", 2))),
            PolicyConfig(pool_spare_slots=1),
            5,
            "5 slots needed: 1 in use, 3 for acme/a, acme/b, 1 spare",
        ),
        (
            PoolLoad(1, 1, 1, 0, (SlotShortage("acme/a", 3),)),
            PolicyConfig(pool_max_slots=2),
            2,
            "4 slots needed: 1 in use, 3 for acme/a; the pool's maximum is 2",
        ),
        (PoolLoad(1), PolicyConfig(pool_min_slots=1), 1, "0 slots needed: 0 in use; the pool's minimum is 1"),
    ],
)
def test_target_and_its_reason(load: PoolLoad, config: PolicyConfig, expected: int, reason: str) -> None:
    target = pool_target(load, config)
    assert (target.num_wanted, target.reason.text) == (expected, reason)


def test_reason_names_few_models() -> None:
    shortages = tuple(SlotShortage(f"acme/{name}", 1) for name in "abcde")
    assert pool_target(PoolLoad(1, shortages=shortages), UNLIMITED).reason.text.endswith("acme/c and 2 more")


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50), st.integers(0, 20), st.integers(0, 5))
def test_target_keeps_to_its_limits(num_used: int, num_short: int, num_idle: int, least: int, num_more: int) -> None:
    config = PolicyConfig(pool_min_slots=least, pool_max_slots=max(least + num_more, 1))
    load = PoolLoad(1, 100, num_used, min(num_idle, num_used), (SlotShortage("acme/a", num_short),))
    assert least <= pool_target(load, config).num_wanted <= config.pool_max_slots


def test_model_lacks_a_slot_for_its_missing_role_its_minimum_and_its_queue() -> None:
    def missing(num_waiting: int, playing: Counter[Role], minimum: int = 0, backlog_s: float = 0.0) -> int:
        demand = Demand(a_model(), num_waiting, 0, 0.0, backlog_s=backlog_s)
        return num_missing_slots(demand, missing_roles(demand, playing, minimum, 0.1, UNLIMITED))

    both = Counter(ROLES)
    assert missing(0, Counter()) == 0
    assert missing(3, Counter()) == missing(3, Counter({Role.PREFILL: 1})) == 1
    assert missing(0, both, minimum=3) == 2
    assert missing(1, both) == 0
    assert missing(500, both, backlog_s=500.0) > 1


def test_model_lacks_an_instance_of_the_role_that_none_plays() -> None:
    waiting = Demand(a_model(), 3, 0, 0.0)
    assert missing_roles(waiting, Counter(), 0, 0.1, UNLIMITED) == Counter(ROLES)
    assert missing_roles(waiting, Counter({Role.PREFILL: 1}), 0, 0.1, UNLIMITED) == Counter({Role.DECODE: 1})
