"""The plan of one pack's relay: an edge for each target."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from torchrelay.scheduler.policy.relay.planning.chain import Chain
from torchrelay.scheduler.policy.relay.planning.edge import TransferEdge
from torchrelay.scheduler.policy.relay.planning.nodes import Node, ReceiveProgress
from torchrelay.scheduler.policy.relay.planning.sender_pool import SenderPool
from torchrelay.scheduler.policy.types import REMOTE


def plan(
    whole: Sequence[str],
    receiving: Sequence[str],
    targets: Sequence[str],
    *,
    nodes: Mapping[str, Node] | None = None,
    arriving: Mapping[str, ReceiveProgress] | None = None,
    live: Collection[str] = (),
    num_bytes: float = 0.0,
) -> tuple[TransferEdge, ...]:
    """Edges for one pack, in the order in which to start them.

    ``whole``: stores that have the whole pack. ``receiving``: stores that receive it, oldest first; ``arriving``: their
    progress. ``targets``: stores that need it, more urgent first among equals. ``nodes``: bandwidth left on the stores'
    links; a store that is absent has the default. ``live``: targets that serve requests and are fed last.
    ``num_bytes``: size of the pack, for the predicted times.

    Striped sources are whole or come before their target in the order of the edges, so bytes flow one way. One of the
    alternates may come later: a follower learns from its bitmap whether it has what is missing.
    """
    known = dict.fromkeys((*whole, *receiving))
    nodes = {store: (nodes or {}).get(store, Node()) for store in (*known, *targets, REMOTE)}
    chain = Chain(nodes, SenderPool(), tuple(whole), num_bytes)
    chain.begin(receiving, arriving or {})
    wanted = list(dict.fromkeys(targets))
    leaders, sharing = _one_per_host(nodes, known, [target for target in wanted if target not in known])
    chain.feed([target for target in leaders if target not in live])
    chain.feed([target for target in leaders if target in live])
    for target, leader in sharing.items():
        chain.fan_out(target, leader)
    return chain.edges([target for target in wanted if target in known])


def _one_per_host(
    nodes: Mapping[str, Node], known: Iterable[str], targets: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Gives each host one network copy. Returns the targets that receive it, and for each other target the store on its
    host that it follows.
    """
    first: dict[str, str] = {}
    for store in known:
        if nodes[store].host:
            first.setdefault(nodes[store].host, store)
    leaders, sharing = [], {}
    for target in targets:
        host = nodes[target].host
        if host in first:
            sharing[target] = first[host]
        else:
            leaders.append(target)
            if host:
                first[host] = target
    return leaders, sharing
