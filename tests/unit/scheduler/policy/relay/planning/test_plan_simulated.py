"""Plans simulated chunk by chunk: near the bound of any schedule, and as predicted. The bench runs a thousand."""

from __future__ import annotations

import statistics

import pytest

from bench.planning.baselines import binomial, nominal_chain, star
from bench.planning.networks import Host, Network, random_network, replay_networks
from bench.planning.outcome import feeds_of, planned, simulate
from bench.planning.simulation import Simulation

PACK_BYTES = 256e6


def even(num_targets: int) -> Network:
    hosts = [Host(f"n{number}", 100e6, 100e6, 0, 0, source=number == 0) for number in range(num_targets + 1)]
    return Network(0, tuple(hosts))


def test_simulation_agrees_with_arithmetic() -> None:
    """A hop; a chain, in which each host is a chunk behind; a star, which shares the source."""
    rates = {name: (100.0, 100.0) for name in "abcd"}
    assert Simulation(rates, ["a"], {"b": ["a"]}, 50, 10.0).run() == {"b": pytest.approx(5.0)}
    chain = Simulation(rates, ["a"], {"b": ["a"], "c": ["b"], "d": ["c"]}, 50, 10.0).run()
    assert chain == {"b": pytest.approx(5.0), "c": pytest.approx(5.1), "d": pytest.approx(5.2)}
    shared = Simulation(rates, ["a"], {"b": ["a"], "c": ["a"], "d": ["a"]}, 50, 10.0).run()
    assert max(shared.values()) == pytest.approx(15.0)
    slow = rates | {"a": (25.0, 100.0), "b": (75.0, 100.0)}
    assert Simulation(slow, ["a", "b"], {"c": ["a", "b"]}, 100, 10.0).run()["c"] == pytest.approx(10.0, rel=0.05)


def test_unreachable_target_is_named() -> None:
    with pytest.raises(RuntimeError, match="never filled: b"):
        Simulation({"a": (1.0, 1.0), "b": (1.0, 1.0)}, [], {"b": ["a"]}, 4, 1.0).run()


def test_seven_hosts_fill_nearly_as_fast_as_one() -> None:
    single, seven = (simulate(even(n), feeds_of(planned(even(n), PACK_BYTES)), PACK_BYTES) for n in (1, 7))
    assert seven.makespan_s / single.makespan_s == pytest.approx(1 + 6 / 256, rel=0.01)


def test_random_networks_fill_near_bound_as_predicted() -> None:
    over_bound, over_greedy = [], []
    for seed in range(5000, 5030):
        network = random_network(seed)
        edges = planned(network, PACK_BYTES)
        outcome = simulate(network, feeds_of(edges), PACK_BYTES)
        assert max(edge.ready_s for edge in edges) == pytest.approx(outcome.makespan_s, rel=0.3)
        over_bound.append(outcome.makespan_s / network.bound_s(PACK_BYTES))
        greedy = simulate(network, nominal_chain(network), PACK_BYTES)
        over_greedy.append(outcome.mean_ready_s / greedy.mean_ready_s)
        assert over_bound[-1] > 0.999  # nothing is faster than the bound
    assert sorted(over_bound)[-3] < 1.1 and statistics.mean(over_greedy) < 0.9


def test_rivals_feed_every_target_once() -> None:
    network = random_network(1)
    for rival in (nominal_chain, star, binomial):
        feeds = rival(network)
        assert sorted(feeds) == [host.name for host in network.targets]
        assert simulate(network, feeds, PACK_BYTES).makespan_s >= network.bound_s(PACK_BYTES)


def test_lab_networks_are_small() -> None:
    networks = replay_networks()
    assert len(networks) == 5
    for network in networks:
        assert 4 <= len(network.hosts) <= 7
        assert all(50e6 <= host.capacity_out * 8 <= 400e6 and not host.load_out for host in network.hosts)
        edges = planned(network, PACK_BYTES)
        assert {edge.target for edge in edges} == {host.name for host in network.targets}
