"""What others would do on the same network: each gives the sources of every target."""

from __future__ import annotations

from bench.planning.networks import Host, Network

Feeds = dict[str, list[str]]


def nominal_chain(network: Network) -> Feeds:
    """The greedy chain of BlitzScale: by the links' nominal capacities, fast targets first, each from the fastest end
    that feeds nobody yet. What else runs on the links is not looked at.
    """
    ends = list(network.sources)
    feeds: Feeds = {}
    for target in sorted(network.targets, key=lambda host: -host.capacity_in):
        source = max(ends, key=lambda host: host.capacity_out)
        ends.remove(source)
        ends.append(target)
        feeds[target.name] = [source.name]
    return feeds


def star(network: Network) -> Feeds:
    """Every target from a source; they take turns."""
    sources = network.sources
    return {host.name: [sources[rank % len(sources)].name] for rank, host in enumerate(network.targets)}


def binomial(network: Network) -> Feeds:
    """A binomial tree, pipelined chunk by chunk: the order of lambdaScale's multicast, blind to the links' rates."""
    order: list[Host] = [*network.sources, *network.targets]
    num_sources = len(network.sources)
    feeds: Feeds = {}
    for rank in range(num_sources, len(order)):
        parent = rank & ~(1 << (rank.bit_length() - 1))  # the highest bit cleared
        feeds[order[rank].name] = [order[parent].name]
    return feeds
