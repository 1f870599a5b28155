"""One network planned and simulated, and its record for a replay in the lab.

`python bench/planning/outcome.py` prints the small networks of ``replay_networks`` as JSON, one per line, with the
planner's edges and predicted times, and the simulated times.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.planning.baselines import Feeds
from bench.planning.networks import Network, replay_networks
from bench.planning.simulation import Simulation
from torchrelay.scheduler.planning import Node, TransferEdge, plan

NUM_CHUNKS = 256
MEASURED_WITHIN = 0.05
REPLAY_BYTES = 64e6


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times of one plan on one network."""

    ready_s: dict[str, float]  # by target

    @property
    def makespan_s(self) -> float:
        return max(self.ready_s.values())

    @property
    def mean_ready_s(self) -> float:
        return statistics.mean(self.ready_s.values())


def planned(network: Network, num_bytes: float, seed: int | None = None) -> tuple[TransferEdge, ...]:
    """The planner's edges; ``seed``: of the errors in its input; None: exact input."""
    rng = random.Random(seed)
    most = 0.0 if seed is None else MEASURED_WITHIN
    nodes = {
        host.name: Node(
            host.residual_out * rng.uniform(1 - most, 1 + most), host.residual_in * rng.uniform(1 - most, 1 + most)
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


def replay(network: Network, num_bytes: float = REPLAY_BYTES) -> dict[str, Any]:
    """A network with its edges and times: what a replay in the lab needs."""
    edges = planned(network, num_bytes)
    simulated = simulate(network, feeds_of(edges), num_bytes)
    return {
        "network": network.as_json(),
        "num_bytes": int(num_bytes),
        "bound_s": network.bound_s(num_bytes),
        "arrows": [
            {
                "target": edge.target,
                "sources": list(edge.sources),
                "num_striped": edge.num_striped,
                "predicted_s": edge.ready_s,
                "simulated_s": simulated.ready_s[edge.target],
            }
            for edge in edges
        ],
    }


if __name__ == "__main__":
    for one in replay_networks():
        print(json.dumps(replay(one)))
