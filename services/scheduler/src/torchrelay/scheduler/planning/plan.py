"""The plan of one pack's relay: an arrow for each target."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torchrelay.scheduler.planning.chain import Chain
from torchrelay.scheduler.planning.edge import TransferEdge
from torchrelay.scheduler.planning.nodes import Node, ReceiveProgress, Uplink
from torchrelay.scheduler.planning.sender_pool import SenderPool
from torchrelay.scheduler.policy.core import REMOTE

_MAX_WAVES = 8  # deadlines told apart


def plan(
    whole: Sequence[str],
    filling: Sequence[str],
    targets: Sequence[str],
    outgoing: Mapping[str, int] | None = None,
    *,
    nodes: Mapping[str, Node] | None = None,
    arriving: Mapping[str, ReceiveProgress] | None = None,
    uplinks: Mapping[str, Uplink] | None = None,
    deadlines: Mapping[str, float] | None = None,
    live: Collection[str] = (),
    num_bytes: float = 0.0,
) -> tuple[TransferEdge, ...]:
    """Arrows for one pack, in the order in which they are to be started.

    ``whole``: stores that have all of it. ``filling``: stores that are receiving it, oldest first, ``arriving`` how
    far they are. ``targets``: stores that need it, the more wanted first where nothing else tells them apart.
    ``nodes``: what the stores' links have left; a store that is absent is presumed to have as much as any, shared with
    the copies it sends already (``outgoing``, of any pack). ``uplinks``: by leaf; absent: never full.
    ``deadlines``: by target, earlier ones are fed first; ``live`` targets, busy with requests, are fed last.
    ``num_bytes`` of the pack: for the predicted times.

    Striped sources are whole or stand before their target, in the order of the arrows, so bytes flow one way. Of the
    alternates one may stand later: a follower tells by its bitmap whether it has what is missing.
    """
    nodes = _nodes_or_default(nodes or {}, outgoing or {}, (*whole, *filling, *targets))
    chain = Chain(nodes, SenderPool(uplinks or {}), tuple(whole), num_bytes)
    chain.begin(filling, arriving or {})
    known = {*whole, *filling}
    wanted = list(dict.fromkeys(targets))
    leaders, sharing = _one_per_host(nodes, known, [target for target in wanted if target not in known])
    for wave in _waves(leaders, deadlines or {}, live):
        chain.feed(wave)
    for target, leader in sharing.items():
        chain.fan_out(target, leader)
    return chain.edges([target for target in wanted if target in known])


def _nodes_or_default(nodes: Mapping[str, Node], outgoing: Mapping[str, int], stores: Sequence[str]) -> dict[str, Node]:
    presumed = Node()
    return {
        store: nodes.get(store) or _shared_node(presumed, outgoing.get(store, 0))
        for store in dict.fromkeys((*stores, REMOTE))
    }


def _shared_node(node: Node, num_followers: int) -> Node:
    return replace(node, residual_out=node.out / (1 + num_followers), busy_out=num_followers > 0)


def _one_per_host(
    nodes: Mapping[str, Node], known: Collection[str], targets: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """One network copy per host: targets that lead, and the others with the store of their host that they follow."""
    first = {nodes[store].host: store for store in known if nodes[store].host}
    leaders, sharing = [], {}
    for target in targets:
        host = nodes[target].host
        if host and host in first:
            sharing[target] = first[host]
            continue
        if host:
            first[host] = target
        leaders.append(target)
    return leaders, sharing


def _waves(targets: Sequence[str], deadlines: Mapping[str, float], live: Collection[str]) -> list[list[str]]:
    """Targets by deadline, the live ones last; close deadlines are one wave where there are too many."""
    moments = sorted({deadlines[target] for target in targets if target in deadlines})
    per_wave = -(-len(moments) // _MAX_WAVES) or 1
    number = {moment: rank // per_wave for rank, moment in enumerate(moments)}
    waves: dict[tuple[bool, float], list[str]] = {}
    for target in targets:
        urgency = number[deadlines[target]] if target in deadlines else math.inf
        waves.setdefault((target in live, urgency), []).append(target)
    return [waves[key] for key in sorted(waves)]
