"""The worth of copies in RAM and on disk."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scheduler.policy.paper_cluster import a_model
from torchrelay.scheduler.policy.demand.lateness import load_cost
from torchrelay.scheduler.policy.replication.worth import pack_worth
from torchrelay.scheduler.policy.storage_tiers import Tier

LOADS = {Tier.HOST: 2.0, Tier.DISK: 8.0, Tier.REMOTE: 26.0}
MODEL = a_model(pack_bytes=16_000_000_000)


def test_the_worked_example_of_the_docs() -> None:
    costs = {tier: load_cost(load_s, 0.1, 2.0, 60.0) for tier, load_s in LOADS.items()}
    assert [round(cost) for cost in costs.values()] == [2, 218, 640]
    worth = pack_worth(MODEL, costs, 300.0, is_on_disk=False)
    assert worth.in_ram == pytest.approx((costs[Tier.REMOTE] - costs[Tier.HOST]) / 16 / 300)
    assert worth.on_disk == pytest.approx((costs[Tier.REMOTE] - costs[Tier.DISK]) / 16 / 300)
    assert str(worth) == (
        "its next use is expected in 300 s, and RAM saves 638 device seconds then: 479 per GB and hour"
    )
    disk_has_it = pack_worth(MODEL, costs, 300.0, is_on_disk=True)
    assert round(worth.in_ram * 3600) == 479 and round(disk_has_it.in_ram * 3600) == 162


def test_load_costs_all_devices_of_slot() -> None:
    costs = {tier: load_cost(load_s, 0.0, 60.0, 60.0) for tier, load_s in LOADS.items()}  # nobody is late
    single, four = (pack_worth(replace(MODEL, num_devices=number), costs, 300.0, is_on_disk=False) for number in (1, 4))
    assert single.saved == pytest.approx(24.0) and four.saved == pytest.approx(96.0)


@given(
    st.tuples(*[st.floats(0.0, 1e6)] * 3),  # measured: in any order
    st.tuples(st.floats(0.1, 1e7), st.floats(0.1, 1e7)),
    st.booleans(),
)
def test_worth_is_never_negative_and_falls_with_return_time(
    costs: tuple[float, ...], returns_s: tuple[float, float], is_on_disk: bool
) -> None:
    load_costs = dict(zip(LOADS, costs, strict=True))
    sooner, later = (pack_worth(MODEL, load_costs, return_s, is_on_disk) for return_s in sorted(returns_s))
    assert sooner.in_ram >= later.in_ram >= 0.0 and sooner.on_disk >= later.on_disk >= 0.0
