"""Models that are woken together and load over the same link: the load that is due sooner goes first."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.core import ServiceClass
from torchrelay.scheduler.policy.policy import Policy
from torchrelay.sim.fleets import served_model
from torchrelay.sim.plant import Plant
from torchrelay.sim.scenario import Fleet, Request

SMALL = served_model("t/small", 1, 8, 32, 131072, 0.45, 15e3, 0.1)
OTHER = replace(SMALL, name="t/other")
LARGE = served_model("t/large", 1, 24, 40, 163840, 0.7, 12e3, 0.15)
BUSY = replace(SMALL, name="t/busy")
FLEET = Fleet(3, (1,), 4e9, 25e9, 1e9, 480 * 10**9)


def ttfts(*requests: Request) -> dict[str, float]:
    """Times to first token by model. All weights are on the first host, whose slot a busy model holds."""
    ids = count()
    policy = Policy(PolicyConfig(replicate=False), lambda: f"i{next(ids)}", 1000.0)
    models = [SMALL, OTHER, LARGE, BUSY]
    plant = Plant(policy, FLEET, models, held={0: [model.name for model in models]})
    outcomes = plant.run([Request("busy", 0.0, BUSY.name, 100, 2_500), *requests])
    assert not any(outcome.is_refused for outcome in outcomes)
    return {outcome.request.model: outcome.ttft_s for outcome in outcomes}


def a_request(model: str, arrives_at: float = 3.0, service_class: ServiceClass = ServiceClass.STANDARD) -> Request:
    return Request(model, arrives_at, model, 100, 10, service_class=service_class)


def test_batch_load_yields_to_interactive_load() -> None:
    batch, urgent = a_request("t/other", 3.0, ServiceClass.BATCH), a_request("t/small", 3.1, ServiceClass.INTERACTIVE)
    alone, together = ttfts(urgent) | ttfts(batch), ttfts(batch, urgent)
    assert alone["t/small"] == pytest.approx(SMALL.pack_bytes / FLEET.nic_bytes_per_s, rel=0.1)
    assert together["t/small"] < 1.1 * alone["t/small"]
    assert together["t/other"] < 2.0 * alone["t/other"]


def test_small_load_overtakes_large_at_small_cost() -> None:
    large, small = a_request("t/large", 3.0), a_request("t/small", 4.0)
    alone, together = ttfts(small) | ttfts(large), ttfts(large, small)
    assert together["t/small"] < 1.1 * alone["t/small"]
    assert together["t/large"] < alone["t/large"] + 1.1 * alone["t/small"]


def test_first_of_equal_loads_goes_first() -> None:
    first, second = a_request("t/other", 3.0), a_request("t/small", 3.1)
    alone, together = ttfts(first), ttfts(first, second)
    assert together["t/other"] < 1.1 * alone["t/other"]
    assert together["t/small"] < 2.0 * alone["t/other"]
