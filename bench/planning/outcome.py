"""A network's plan, and its simulated times."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.planning.baselines import Feeds
from bench.planning.networks import Network
from bench.planning.simulation import Simulation
from torchrelay.scheduler.policy.relay.planning import Node, TransferEdge, plan

NUM_CHUNKS = 256
MEASURED_WITHIN = 0.05


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times of a plan on a network."""

    ready_s: dict[str, float]  # by target

    @property
    def makespan_s(self) -> float:
        return max(self.ready_s.values())

    @property
    def mean_ready_s(self) -> float:
        return statistics.mean(self.ready_s.values())


def planned(network: Network, num_bytes: float, seed: int | None = None) -> tuple[TransferEdge, ...]:
    """The planner's edges. ``seed`` draws errors of its input (None: exact input)."""
    rng = random.Random(seed)
    error = 0.0 if seed is None else MEASURED_WITHIN
    nodes = {
        host.name: Node(
            host.residual_out * rng.uniform(1 - error, 1 + error), host.residual_in * rng.uniform(1 - error, 1 + error)
        )
        for host in network.hosts
    }
    whole, targets = [host.name for host in network.sources], [host.name for host in network.targets]
    return plan(whole, (), targets, nodes=nodes, num_bytes=num_bytes)


def feeds_of(edges: Sequence[TransferEdge]) -> Feeds:
    return {edge.target: list(edge.striped) for edge in edges}


def simulate(network: Network, feeds: Feeds, num_bytes: float) -> Outcome:
    rates = {host.name: (host.residual_out, host.residual_in) for host in network.hosts}
    whole = [host.name for host in network.sources]
    return Outcome(Simulation(rates, whole, feeds, NUM_CHUNKS, num_bytes / NUM_CHUNKS).run())
