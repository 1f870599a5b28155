"""Relay plans: one network copy per host, nothing before it has it, free directions first, fast targets first."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.planning.baselines import nominal_chain
from bench.planning.networks import random_network
from bench.planning.outcome import feeds_of, planned, simulate
from torchrelay.scheduler.policy.relay.planning import (
    MAX_ALTERNATES,
    MAX_STRIPED,
    Node,
    ReceiveProgress,
    TransferEdge,
    plan,
)
from torchrelay.scheduler.policy.types import REMOTE

NAMES = [f"s{number}" for number in range(12)]
MB = 1e6


def upstreams(edges: tuple[TransferEdge, ...]) -> dict[str, tuple[str, ...]]:
    return {edge.target: edge.striped for edge in edges}


def test_remote_store_feeds_one_chain() -> None:
    edges = plan([], [], ["s1", "s2", "s3"])
    assert [(edge.target, edge.upstream) for edge in edges] == [("s1", REMOTE), ("s2", "s1"), ("s3", "s2")]
    assert edges[0].sources == (REMOTE,)
    assert edges[1].sources == ("s1", "s3", REMOTE)  # s3 follows it: a last resort before the remote store
    assert edges[2].sources == ("s2", "s1", REMOTE)


def test_host_with_pack_gets_edge_without_transfer() -> None:
    edges = plan(["s0", "s1"], [], ["s1", "s2"])
    assert edges[0].already_there and edges[0].sources == ("s0", REMOTE)
    assert [str(edge).split(" at ")[0] for edge in edges] == ["s1 from its host copy", "s2 from s0"]
    assert edges[1].upstream == "s0"


def test_fast_target_stripes_over_two_slow_sources() -> None:
    nodes = {"s0": Node(60 * MB), "s1": Node(40 * MB), "s2": Node(residual_in=100 * MB)}
    (edge,) = plan(["s0", "s1"], [], ["s2"], nodes=nodes, num_bytes=100 * MB)
    assert edge.striped == ("s0", "s1") and edge.shares == pytest.approx((0.6, 0.4))
    assert edge.bytes_per_s == pytest.approx(100 * MB)
    assert str(edge) == "s2 from s0 60 % and s1 40 % at 100 MB/s, ready in 1 s"
    assert str(replace(edge, ready_s=0.0127)).endswith("ready in 12.7 ms")


def test_direction_with_kv_is_spared_if_another_is_free() -> None:
    nodes = {"s0": Node(800 * MB, busy_out=True), "s1": Node(900 * MB), "s2": Node(residual_in=100 * MB)}
    assert upstreams(plan(["s0", "s1"], [], ["s2"], nodes=nodes)) == {"s2": ("s1",)}
    nodes["s1"] = Node(10 * MB)
    assert upstreams(plan(["s0", "s1"], [], ["s2"], nodes=nodes)) == {"s2": ("s0",)}


def test_copy_with_all_chunks_feeds_at_full_rate() -> None:
    nodes = {"s0": Node(60 * MB), "s1": Node(residual_in=50 * MB)}
    (edge,) = plan([], ["s0"], ["s1"], nodes=nodes, arriving={"s0": ReceiveProgress(1.0, 80 * MB)})
    assert edge.striped == ("s0",) and edge.bytes_per_s == 50 * MB


def test_host_gets_one_network_copy_and_fans_out() -> None:
    nodes = {"s0": Node(host="a"), "s1": Node(host="b"), "s2": Node(host="b"), "s3": Node(host="a")}
    edges = plan(["s0"], [], ["s1", "s2", "s3"], nodes=nodes)
    assert upstreams(edges) == {"s1": ("s0",), "s2": ("s1",), "s3": ("s0",)}


def test_live_target_is_fed_last() -> None:
    edges = plan(["s0"], [], ["s1", "s2", "s3"], live={"s1"})
    assert [edge.target for edge in edges] == ["s2", "s3", "s1"]


def test_leaf_uplink_is_crossed_once() -> None:
    nodes = {name: Node(leaf="left" if name in ("s0", "s1", "s2") else "right") for name in NAMES[:6]}
    edges = plan(["s0"], [], ["s1", "s3", "s2", "s4", "s5"], nodes=nodes)
    crossings = [edge for edge in edges if nodes[edge.upstream].leaf != nodes[edge.target].leaf]
    assert len(crossings) == 1 and all(edge.num_striped == 1 for edge in edges)


names = st.lists(st.sampled_from(NAMES), unique=True)
rates = st.floats(1e3, 1e10) | st.sampled_from([0.0, 1e8])
some_nodes = st.builds(
    Node,
    residual_out=rates,
    residual_in=rates,
    host=st.sampled_from(["", "", "a", "b"]),
    busy_out=st.booleans(),
    leaf=st.sampled_from(["", "x", "y"]),
)


@given(
    whole=names,
    filling=names,
    targets=names,
    nodes=st.dictionaries(st.sampled_from([*NAMES, REMOTE]), some_nodes),
    arriving=st.dictionaries(st.sampled_from(NAMES), st.builds(ReceiveProgress, st.floats(0, 1), rates)),
    live=st.sets(st.sampled_from(NAMES)),
)
def test_every_target_is_fed_by_earlier_holders(
    whole: list[str],
    filling: list[str],
    targets: list[str],
    nodes: dict[str, Node],
    arriving: dict[str, ReceiveProgress],
    live: set[str],
) -> None:
    filling = [store for store in filling if store not in whole]
    edges = plan(whole, filling, targets, nodes=nodes, arriving=arriving, live=live, num_bytes=1e9)
    assert edges == plan(whole, filling, targets, nodes=nodes, arriving=arriving, live=live, num_bytes=1e9)
    assert sorted(edge.target for edge in edges) == sorted(targets)
    known = {*whole, *filling, *targets}
    has = {*whole, *filling}
    for edge in edges:
        assert edge.already_there == (edge.target in whole or edge.target in filling)
        assert edge.sources[-1] == REMOTE and edge.sources.count(REMOTE) == 1
        assert edge.target not in edge.sources and set(edge.sources) - {REMOTE} <= known
        assert len(set(edge.sources)) == len(edge.sources) <= MAX_STRIPED + MAX_ALTERNATES + 1
        if edge.already_there:
            continue
        assert 1 <= edge.num_striped <= MAX_STRIPED and len(edge.shares) == edge.num_striped
        assert sum(edge.shares) == pytest.approx(1) and all(share > 0 for share in edge.shares)
        assert set(edge.striped) <= has or (edge.striped == (REMOTE,) and not has)
        assert edge.bytes_per_s > 0 and edge.ready_s > 0
        has.add(edge.target)


@given(targets=st.integers(1, 40), sources=st.integers(1, 4), seed=st.randoms(use_true_random=False))
def test_no_direction_is_allocated_beyond_its_rate(targets: int, sources: int, seed: object) -> None:
    nodes = {f"n{number}": Node(seed.uniform(10, 1000), seed.uniform(10, 1000)) for number in range(targets + sources)}  # type: ignore[attr-defined]
    stores = list(nodes)
    edges = plan(stores[:sources], [], stores[sources:], nodes=nodes, num_bytes=1e4)
    sent: Counter[str] = Counter()
    for edge in edges:
        assert edge.bytes_per_s <= nodes[edge.target].residual_in * 1.001
        for source, share in zip(edge.striped, edge.shares, strict=True):
            sent[source] += share * edge.bytes_per_s  # type: ignore[assignment]
    assert all(rate <= nodes[store].residual_out * 1.03 for store, rate in sent.items())


PACK_BYTES = 256e6


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
