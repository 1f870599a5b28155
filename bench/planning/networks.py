"""Random uneven networks for the planner's bench, and small networks to replay in the lab.

The link of a host has a capacity in bytes per second and a background load, a fraction of it, in either direction.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

MIN_BYTES_PER_S, MAX_BYTES_PER_S = 125e6, 1250e6  # 1 to 10 Gbit/s
MAX_LOAD = 0.8
MBIT = 1e6 / 8


@dataclass(frozen=True, slots=True)
class Host:
    """A host whose link has the same capacity but different loads in the two directions."""

    name: str
    capacity_out: float
    capacity_in: float
    load_out: float
    load_in: float
    source: bool = False

    @property
    def residual_out(self) -> float:
        """Bytes per second left for relays, after other traffic."""
        return self.capacity_out * (1 - self.load_out)

    @property
    def residual_in(self) -> float:
        return self.capacity_in * (1 - self.load_in)


@dataclass(frozen=True, slots=True)
class Network:
    """Hosts, of which all but the sources want the pack."""

    seed: int
    hosts: tuple[Host, ...]

    @property
    def sources(self) -> list[Host]:
        return [host for host in self.hosts if host.source]

    @property
    def targets(self) -> list[Host]:
        return [host for host in self.hosts if not host.source]

    def bound_s(self, num_bytes: float) -> float:
        """Lower bound of any schedule: from each target's ingress, the sources' egress, and the total egress over all
        bytes to receive.
        """
        sent = sum(host.residual_out for host in self.sources)
        useful = sent + sum(host.residual_out for host in self.targets)
        slowest = min(min(host.residual_in, useful - host.residual_out) for host in self.targets)
        return num_bytes / min(sent, slowest, useful / len(self.targets))


def random_network(
    seed: int,
    sizes: tuple[int, int] = (4, 64),
    capacities: tuple[float, float] = (MIN_BYTES_PER_S, MAX_BYTES_PER_S),
    max_load: float = MAX_LOAD,
) -> Network:
    """A network with ``sizes`` as the range of its number of hosts, and one to four sources."""
    rng = random.Random(seed)
    num_hosts = rng.randint(*sizes)
    num_sources = rng.randint(1, min(4, max(num_hosts // 4, 1)))
    least, most = map(math.log, capacities)
    hosts = []
    for number in range(num_hosts):
        capacity = math.exp(rng.uniform(least, most))
        load_out, load_in = rng.uniform(0, max_load), rng.uniform(0, max_load)
        hosts.append(Host(f"n{number:02}", capacity, capacity, load_out, load_in, number < num_sources))
    return Network(seed, tuple(hosts))


def replay_networks(count: int = 5) -> list[Network]:
    """Networks that the lab can replay with shaped links: 4 to 7 hosts, 50 to 400 Mbit/s, no background load."""
    return [random_network(9000 + number, (4, 7), (50 * MBIT, 400 * MBIT), 0.0) for number in range(count)]
