"""The relay planner against the max-flow bound, and against other strategies on the same networks.

    python bench/planner.py [--quick]

Random uneven networks: 4 to 64 hosts, one to four of which have the pack, links of 1 to 10 Gbit/s, up to 80 % of each
direction taken by other traffic. The planner sees what is left within 5 %, as a measurement would. Each plan is
simulated chunk by chunk, without the planner's model (``planning/simulation.py``), and the time until the last target
is complete is compared with a lower bound for any schedule.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.planning.baselines import Feeds, binomial, nominal_chain, star
from bench.planning.networks import Network, random_network
from bench.planning.outcome import MEASURED_WITHIN, NUM_CHUNKS, Outcome, feeds_of, planned, simulate
from bench.report import Check, finish, progress
from torchrelay.scheduler.planning import Node, plan

PACK_BYTES = 1024e6
RIVALS: dict[str, Callable[[Network], Feeds]] = {"chain": nominal_chain, "star": star, "binomial": binomial}


@dataclass(frozen=True, slots=True)
class Row:
    """One network. ``predicted_s``: the planner's own makespan."""

    bound_s: float
    predicted_s: float
    outcomes: dict[str, Outcome]

    def over_bound(self, name: str) -> float:
        return self.outcomes[name].makespan_s / self.bound_s


def row(seed: int) -> Row:
    network = random_network(seed)
    edges = planned(network, PACK_BYTES, seed)
    outcomes = {"plan": simulate(network, feeds_of(edges), PACK_BYTES)}
    outcomes |= {name: simulate(network, rival(network), PACK_BYTES) for name, rival in RIVALS.items()}
    return Row(network.bound_s(PACK_BYTES), max(edge.ready_s for edge in edges), outcomes)


def rows(num_networks: int) -> list[Row]:
    found: list[Row] = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for number, one in enumerate(pool.map(row, range(num_networks), chunksize=5), 1):
            found.append(one)
            if number % (num_networks // 10) == 0:
                progress(f"{number} of {num_networks} networks played")
    return found


def plan_ms(num_hosts: int, samples: int = 15) -> float:
    """Median over networks of this size of the best of three runs."""
    taken = []
    for seed in range(samples):
        network = random_network(seed, (num_hosts, num_hosts))
        nodes = {host.name: Node(host.residual_out, host.residual_in) for host in network.hosts}
        whole, targets = [host.name for host in network.sources], [host.name for host in network.targets]
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            plan(whole, (), targets, nodes=nodes, num_bytes=PACK_BYTES)
            times.append((time.perf_counter() - begin) * 1e3)
        taken.append(min(times))
    return statistics.median(taken)


def percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def checks(found: list[Row]) -> list[Check]:
    def p95(name: str) -> float:
        return percentile([one.over_bound(name) for one in found], 95)

    ready = [one.outcomes["plan"].mean_ready_s / one.outcomes["chain"].mean_ready_s for one in found]
    missed = [abs(one.predicted_s / one.outcomes["plan"].makespan_s - 1) for one in found]
    worst = max(one.over_bound("plan") for one in found)
    return [
        Check("p95_over_bound", p95("plan"), "ratio", 1.15, "makespan over the max-flow bound, P95"),
        Check("max_over_bound", worst, "ratio", against="the worst network"),
        Check("mean_ready_over_greedy", statistics.mean(ready), "ratio", 0.9, "nominal greedy chain (BlitzScale's)"),
        Check("p95_ready_over_greedy", percentile(ready, 95), "ratio", against="the same, P95 over networks"),
        Check("plan64_ms", plan_ms(64), "ms", 10, "64 hosts"),
        Check("plan1000_ms", plan_ms(1000), "ms", 100, "1,000 hosts"),
        Check("prediction_error_p95", percentile(missed, 95), "ratio", against="predicted against simulated makespan"),
        Check("greedy_over_bound", p95("chain"), "ratio", against="nominal greedy chain, P95"),
        Check("star_over_bound", p95("star"), "ratio", against="star, P95"),
        Check("binomial_over_bound", p95("binomial"), "ratio", against="binomial tree, pipelined, P95"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="120 networks instead of 1,000, under 50 s")
    num_networks = 120 if parser.parse_args().quick else 1000
    found = rows(num_networks)
    finish(
        "planner", {"networks": num_networks, "chunks": NUM_CHUNKS, "measured_within": MEASURED_WITHIN}, checks(found)
    )


if __name__ == "__main__":
    main()
