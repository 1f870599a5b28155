"""Fluid links: fair shares, and chains against a simulation of every chunk."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torchrelay.sim.events import Event, EventQueue
from torchrelay.sim.flows import FluidNetwork, Stream, Transfer, class_rates, fair_rates

NUM_CHUNKS = 256
LINKS = ("a", "b", "c", "d")


def chunk_times(num_bytes: float, rates: list[float]) -> list[float]:
    """Times at which each host of a chain has the whole pack if every chunk is stored, then forwarded."""
    size = num_bytes / NUM_CHUNKS
    have = [0.0] * NUM_CHUNKS
    ends = []
    for rate in rates:
        free_at = 0.0
        for chunk in range(NUM_CHUNKS):
            free_at = max(free_at, have[chunk]) + size / rate
            have[chunk] = free_at
        ends.append(have[-1])
    return ends


@given(st.lists(st.floats(1e6, 1e9), min_size=1, max_size=6))
@example([1000001.0, 1000000.0, 1000001.0])  # the last ends with the first, beside its source
def test_chain_takes_time_of_its_chunks(rates: list[float]) -> None:
    events, ends = EventQueue(), dict[int, float]()

    def note(number: int) -> None:
        ends[number] = events.now

    network = FluidNetwork(events, {number: rate for number, rate in enumerate(rates)})
    upstream: Transfer | None = None
    for number in range(len(rates)):
        upstream = network.begin(1e9, [Stream((number,), upstream)], partial(note, number))
    events.run()
    for number, expected in enumerate(chunk_times(1e9, rates)):
        assert ends[number] == pytest.approx(expected, rel=(number + 2) / NUM_CHUNKS)


streams = st.lists(
    st.tuples(st.sets(st.sampled_from(LINKS), min_size=1).map(lambda links: tuple(sorted(links))), st.floats(0.1, 100)),
    min_size=1,
    max_size=8,
)


@given(streams, st.fixed_dictionaries({link: st.floats(1, 50) for link in LINKS}))
def test_rates_are_max_min_fair(demands: list[tuple[tuple[str, ...], float]], capacity: dict[str, float]) -> None:
    rates = fair_rates(demands, {link: capacity[link] for link in LINKS})
    used = {link: sum(rate for rate, (links, _) in zip(rates, demands, strict=True) if link in links) for link in LINKS}
    for link in LINKS:
        assert used[link] <= capacity[link] * 1.0001
    for rate, (links, cap) in zip(rates, demands, strict=True):
        assert rate <= cap * 1.0001
        # Max-min: a stream below its cap has a full link on which no stream gets more.
        bottlenecks = [link for link in links if used[link] >= capacity[link] * 0.9999]
        others = {link: max(r for r, (ls, _) in zip(rates, demands, strict=True) if link in ls) for link in bottlenecks}
        assert rate >= cap * 0.9999 or any(rate >= most * 0.9999 for most in others.values())


def test_late_follower_catches_up_then_keeps_rate() -> None:
    events, ends = EventQueue(), dict[str, float]()
    network = FluidNetwork(events, {"slow": 100.0, "fast": 400.0})
    first = network.begin(1000.0, [Stream(("slow",))], lambda: ends.update(first=events.now))
    events.run(until=5.0)
    network.begin(1000.0, [Stream(("fast",), first)], lambda: ends.update(second=events.now))
    events.run()
    assert ends["first"] == pytest.approx(10.0)
    assert ends["second"] == pytest.approx(10.0, rel=2 / NUM_CHUNKS), "whole a chunk after its source"


def test_redirect_and_abort_change_rates() -> None:
    events, ends = EventQueue(), dict[str, float]()
    network = FluidNetwork(events, {"a": 100.0, "b": 100.0})
    first = network.begin(1000.0, [Stream(("a",))], lambda: ends.update(first=events.now))
    second = network.begin(1000.0, [Stream(("a",))], lambda: ends.update(second=events.now))
    events.run(until=4.0)
    assert network.received(first) == pytest.approx(200.0)
    network.redirect(second, [Stream(("a",)), Stream(("b",))])
    events.run(until=6.0)
    network.abort(first)
    events.run()
    assert "first" not in ends
    assert ends["second"] == pytest.approx(6.0 + (1000 - 200 - 2 * 150) / 200)


def test_nearly_equal_rates_cause_few_events() -> None:
    """Regression: each change of a rate let others fall behind and catch up, which changed rates again."""
    num_hosts, num_packs, random_ = 16, 8, random.Random(0)
    num_made, ends = 0, list[float]()

    class CountedEvents(EventQueue):
        def at(self, at: float, call: Callable[[], None]) -> Event:
            def made() -> None:
                nonlocal num_made
                num_made += 1
                assert num_made <= 600
                call()

            return super().at(at, made)

    events = CountedEvents()
    links = [(direction, host) for direction in ("in", "out") for host in range(num_hosts)]
    network = FluidNetwork(events, dict.fromkeys(links, 100.0))
    copies: list[dict[int, Transfer | None]] = [{pack: None} for pack in range(num_packs)]
    for _ in range(60):
        events.run(until=events.now + random_.random() / 2)
        held = random_.choice(copies)
        target = random_.choice([host for host in range(num_hosts) if host not in held])
        sources = random_.sample(sorted(held), min(2, len(held)))
        streams = [Stream((("out", source), ("in", target)), held[source]) for source in sources]
        held[target] = network.begin(1000.0, streams, lambda: ends.append(events.now))
    events.run()
    assert len(ends) == 60


def test_idle_transfer_takes_remaining_bandwidth() -> None:
    events = EventQueue()
    network = FluidNetwork(events, {"a": 10.0, "b": 100.0})
    idle = network.begin(100.0, [Stream(("a",), is_idle=True)], lambda: None)
    beside = network.begin(1000.0, [Stream(("b",), is_idle=True)], lambda: None)
    assert (idle.bytes_per_s, beside.bytes_per_s) == (10.0, 100.0)
    awaited = network.begin(20.0, [Stream(("a", "b"))], lambda: None)
    assert (awaited.bytes_per_s, idle.bytes_per_s, beside.bytes_per_s) == (10.0, 0.0, 90.0)
    events.run(2.5)
    assert awaited.is_complete and idle.bytes_per_s == 10.0
    network.redirect(idle, [Stream(("a",))])
    assert idle.bytes_per_s == 10.0


def test_idle_streams_share_remaining_bandwidth() -> None:
    streams = [Stream(("a",)), Stream(("a",), is_idle=True), Stream(("a", "b"), is_idle=True)]
    assert class_rates(streams, [4.0, math.inf, math.inf], {"a": 10.0, "b": 1.0}) == [4.0, 5.0, 1.0]
