"""Random uneven networks for the planner's bench, and small ones to replay in the lab.

A network is a set of hosts whose links have a capacity and a background load in either direction. As JSON:

    {"seed": 7, "nodes": [{"name": "n00", "capacity_out": 2.5e7, "capacity_in": 2.5e7, "load_out": 0.3, "load_in": 0.0,
                           "source": true}, ...]}

Capacities are bytes per second, loads the fraction of them that other traffic takes.
"""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass
from typing import Any

LEAST_BYTES_PER_S, MOST_BYTES_PER_S = 125e6, 1250e6  # 1 to 10 Gbit/s
MOST_LOAD = 0.8
MBIT = 1e6 / 8


@dataclass(frozen=True, slots=True)
class Host:
    """A host; its link has the same capacity in both directions, but not the same load."""

    name: str
    capacity_out: float
    capacity_in: float
    load_out: float
    load_in: float
    source: bool = False

    @property
    def residual_out(self) -> float:
        """Bytes per second left for relays: KV comes first."""
        return self.capacity_out * (1 - self.load_out)

    @property
    def residual_in(self) -> float:
        return self.capacity_in * (1 - self.load_in)


@dataclass(frozen=True, slots=True)
class Network:
    """Hosts; all but the sources want the pack."""

    seed: int
    hosts: tuple[Host, ...]

    @property
    def sources(self) -> list[Host]:
        return [host for host in self.hosts if host.source]

    @property
    def targets(self) -> list[Host]:
        return [host for host in self.hosts if not host.source]

    def bound_s(self, num_bytes: float) -> float:
        """Lower bound for any schedule: by each target's ingress, by the sources' egress, and by the total egress over
        the total to receive.
        """
        sent = sum(host.residual_out for host in self.sources)
        useful = sent + sum(host.residual_out for host in self.targets)
        slowest = min(min(host.residual_in, useful - host.residual_out) for host in self.targets)
        return num_bytes / min(sent, slowest, useful / len(self.targets))

    def as_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "nodes": [_renamed(asdict(host)) for host in self.hosts],
        }


def _renamed(host: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in host.items()}


def network_of(record: dict[str, Any]) -> Network:
    """The inverse of ``Network.as_json``."""
    return Network(record["seed"], tuple(Host(**host) for host in record["nodes"]))


def random_network(
    seed: int,
    sizes: tuple[int, int] = (4, 64),
    capacities: tuple[float, float] = (LEAST_BYTES_PER_S, MOST_BYTES_PER_S),
    most_load: float = MOST_LOAD,
) -> Network:
    """``sizes``: range of the number of hosts. One host in eight is a source, from one to four."""
    rng = random.Random(seed)
    num_hosts = rng.randint(*sizes)
    num_sources = rng.randint(1, min(4, max(num_hosts // 4, 1)))
    least, most = map(math.log, capacities)
    hosts = []
    for number in range(num_hosts):
        capacity = math.exp(rng.uniform(least, most))
        load_out, load_in = rng.uniform(0, most_load), rng.uniform(0, most_load)
        hosts.append(Host(f"n{number:02}", capacity, capacity, load_out, load_in, number < num_sources))
    return Network(seed, tuple(hosts))


def replay_networks(count: int = 5) -> list[Network]:
    """Networks small enough for the lab: 4 to 7 hosts with links of 50 to 400 Mbit/s and no background load, which
    shaped links alone can replay.
    """
    return [random_network(9000 + number, (4, 7), (50 * MBIT, 400 * MBIT), 0.0) for number in range(count)]
