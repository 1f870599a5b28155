"""Other strategies on the same network; each returns the sources of every target."""

from __future__ import annotations

from bench.planning.networks import Host, Network

Feeds = dict[str, list[str]]


def nominal_chain(network: Network) -> Feeds:
    """BlitzScale's greedy chain by nominal capacity: fast targets first, each from the fastest end without a follower.
    It ignores other traffic on the links.
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
    """Feeds every target from a source, round robin."""
    sources = network.sources
    return {host.name: [sources[rank % len(sources)].name] for rank, host in enumerate(network.targets)}


def binomial(network: Network) -> Feeds:
    """A binomial tree, pipelined by chunk, in lambdaScale's multicast order; it ignores link rates."""
    order: list[Host] = [*network.sources, *network.targets]
    num_sources = len(network.sources)
    feeds: Feeds = {}
    for rank in range(num_sources, len(order)):
        parent = rank & ~(1 << (rank.bit_length() - 1))  # the highest bit cleared
        feeds[order[rank].name] = [order[parent].name]
    return feeds
