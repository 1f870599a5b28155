"""The relay planner against the max-flow bound and against other strategies on the same networks.

    python bench/planner.py [--quick]

Random uneven networks have 4 to 64 hosts, one to four of which hold the pack, and links of 1 to 10 Gbit/s, of which
other traffic takes up to 80% in each direction. The planner knows the rest within 5%, as from a measurement. Each plan
is simulated chunk by chunk, without the planner's model (``planning/simulation.py``), and the time until the last
target is complete is compared with a lower bound of any schedule.
"""

from __future__ import annotations

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
from bench.report import Check, finish, parser_of, percentile, progress
from torchrelay.scheduler.policy.relay.planning import Node, plan

PACK_BYTES = 1024e6
RIVALS: dict[str, Callable[[Network], Feeds]] = {"chain": nominal_chain, "star": star, "binomial": binomial}


@dataclass(frozen=True, slots=True)
class Row:
    """Results on a network. ``predicted_s``: the planner's own makespan."""

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
    results: list[Row] = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for result in pool.map(row, range(num_networks), chunksize=5):
            results.append(result)
            if len(results) % (num_networks // 10) == 0:
                progress(f"{len(results)} of {num_networks} networks simulated")
    return results


def plan_ms(num_hosts: int, samples: int = 15) -> float:
    """Median over networks of this size of the fastest of three runs."""
    best_ms = []
    for seed in range(samples):
        network = random_network(seed, (num_hosts, num_hosts))
        nodes = {host.name: Node(host.residual_out, host.residual_in) for host in network.hosts}
        whole, targets = [host.name for host in network.sources], [host.name for host in network.targets]
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            plan(whole, (), targets, nodes=nodes, num_bytes=PACK_BYTES)
            times.append((time.perf_counter() - begin) * 1e3)
        best_ms.append(min(times))
    return statistics.median(best_ms)


def checks(results: list[Row]) -> list[Check]:
    def p95(name: str) -> float:
        return percentile([result.over_bound(name) for result in results], 95)

    ready = [result.outcomes["plan"].mean_ready_s / result.outcomes["chain"].mean_ready_s for result in results]
    errors = [abs(result.predicted_s / result.outcomes["plan"].makespan_s - 1) for result in results]
    worst = max(result.over_bound("plan") for result in results)
    return [
        Check("p95_over_bound", p95("plan"), "ratio", 1.15, "makespan over the max-flow bound, P95"),
        Check("max_over_bound", worst, "ratio", against="the worst network"),
        Check("mean_ready_over_greedy", statistics.mean(ready), "ratio", 0.9, "nominal greedy chain (BlitzScale's)"),
        Check("p95_ready_over_greedy", percentile(ready, 95), "ratio", against="the same, P95 over networks"),
        Check("plan64_ms", plan_ms(64), "ms", 10, "64 hosts"),
        Check("plan1000_ms", plan_ms(1000), "ms", 100, "1,000 hosts"),
        Check("prediction_error_p95", percentile(errors, 95), "ratio", against="predicted against simulated makespan"),
        Check("greedy_over_bound", p95("chain"), "ratio", against="nominal greedy chain, P95"),
        Check("star_over_bound", p95("star"), "ratio", against="star, P95"),
        Check("binomial_over_bound", p95("binomial"), "ratio", against="binomial tree, pipelined, P95"),
    ]


def main() -> None:
    parser = parser_of(__doc__, "120 networks instead of 1,000, under 50 s")
    num_networks = 120 if parser.parse_args().quick else 1000
    conditions = {"networks": num_networks, "chunks": NUM_CHUNKS, "measured_within": MEASURED_WITHIN}
    finish("planner", conditions, checks(rows(num_networks)))


if __name__ == "__main__":
    main()
