"""Relays between simulated stores whose arenas are full."""

from __future__ import annotations

from dataclasses import replace

from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.effects import Hop
from torchrelay.scheduler.policy.policy import Policy
from torchrelay.scheduler.policy.types import REMOTE
from torchrelay.sim.events import EventQueue
from torchrelay.sim.fleets import CLUSTER_A, published_models
from torchrelay.sim.plant import policy_model
from torchrelay.sim.scheduler import SimulatedScheduler
from torchrelay.sim.spent import Meter
from torchrelay.sim.stores import SimulatedStores

SMALL, OTHER = (model for model in published_models(3) if model.num_devices == 1)


def test_relay_that_becomes_urgent_leaves_a_source_without_the_pack() -> None:
    """Regression: the simulation ended if a source had evicted the pack of an idle relay that a load then joined."""
    events = EventQueue()
    scheduler = SimulatedScheduler(Policy(PolicyConfig(), lambda: "i", 0.0), events, lambda _: None)
    fleet = replace(CLUSTER_A, num_hosts=2, arena_bytes=SMALL.pack_bytes)
    served = {model.name: model for model in (SMALL, OTHER)}
    stores = SimulatedStores(events, fleet, served, Meter(events), scheduler)
    source, target = stores.of.values()
    stores.hold(source, [SMALL.name])
    from_source = Hop(target.store_id, (source.store_id, REMOTE), ())
    stores.relay(policy_model(SMALL), from_source, is_idle=True)
    assert target.sources[SMALL.name] == (source.store_id,)
    events.run(0.5)
    stores.relay(policy_model(OTHER), Hop(source.store_id, (REMOTE,), ()))
    stores.relay(policy_model(SMALL), from_source)
    assert target.sources[SMALL.name] == (REMOTE,)
    events.run(20.0)
    assert target.copies[SMALL.name] is None, "the rest came from the disk"
