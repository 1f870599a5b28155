"""The chain of stores that the pack passes through, and the edges along it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchrelay.scheduler.policy.relay.planning.edge import MAX_ALTERNATES, MAX_STRIPED, TransferEdge
from torchrelay.scheduler.policy.relay.planning.nodes import MIN_BYTES_PER_S, Node, ReceiveProgress
from torchrelay.scheduler.policy.relay.planning.rate_allocation import ChainMember, fair_rate
from torchrelay.scheduler.policy.relay.planning.sender_pool import SenderPool, SourceAllocation
from torchrelay.scheduler.policy.types import REMOTE

_CHUNKS = 256  # chunks of a pack, by its layout: a host is a chunk behind its source
_SIMILAR_RATES = 1.25  # rates within this factor count as equal
_NUM_DOWNSTREAM_ALTERNATES = 1  # alternates, among MAX_ALTERNATES, that come later in the chain


@dataclass
class Chain:
    """Stores in the order in which the pack passes them, and the edges so far."""

    nodes: Mapping[str, Node]
    pool: SenderPool
    whole: tuple[str, ...]
    num_bytes: float
    began: list[str] = field(default_factory=list)  # receiving stores; each before the stores that it may feed
    _edges: list[TransferEdge] = field(default_factory=list)

    def begin(self, receiving: Sequence[str], arriving: Mapping[str, ReceiveProgress]) -> None:
        for store in self.whole:
            self.pool.add(store, self.nodes[store])
        for store in receiving:
            cap = arriving.get(store, ReceiveProgress()).serves_bytes_per_s
            self.pool.add(store, self.nodes[store], cap, self._fill_s(cap), 0.0)
            self.began.append(store)

    def _fill_s(self, rate: float) -> float:
        return self.num_bytes / max(rate, MIN_BYTES_PER_S)

    def feed(self, wave: Sequence[str]) -> None:
        """Adds the edges of targets that are fed together: the fastest first, and among equals the better sender."""
        if not wave:
            return
        nodes, senders = self.nodes, self.pool.senders
        members = [ChainMember(nodes[target].into, nodes[target].out) for target in wave]
        members += [ChainMember(senders[store].cap, senders[store].left, 0) for store in self.began]
        members.sort(key=lambda member: (-member.into, member.takes))
        sent = sum(senders[store].left for store in self.whole)
        if not senders:  # the remote store heads one chain: one target reads it, even if it could send more
            sent = min(nodes[REMOTE].out, members[0].into)
        rate = fair_rate(sent, members) if sent > 0 or self.began else members[0].into
        needs = {target: max(min(nodes[target].into, rate), MIN_BYTES_PER_S) for target in wave}
        for target in self._chain_order(wave, needs):
            allocations = self.pool.allocate(needs[target], nodes[target].leaf, MAX_STRIPED)
            self._add_edge(target, allocations or [SourceAllocation(REMOTE, min(nodes[REMOTE].out, needs[target]))])

    def _chain_order(self, wave: Sequence[str], needs: Mapping[str, float]) -> list[str]:
        """The targets in chain order: the fastest first, and among equals the better sender. With several leaves,
        targets of similar rates are grouped by leaf, beginning with a leaf that has the pack.
        """
        nodes = self.nodes
        having = {nodes[store].leaf for store in self.pool.senders}
        if len(having | {nodes[target].leaf for target in wave}) <= 1:
            return sorted(wave, key=lambda store: (-needs[store], -nodes[store].out))

        def place(store: str) -> tuple[int, bool, str, float, float]:
            leaf, need = nodes[store].leaf, needs[store]
            return -int(math.log(need, _SIMILAR_RATES)), leaf not in having, leaf, -need, -nodes[store].out

        return sorted(wave, key=place)

    def fan_out(self, target: str, leader: str) -> None:
        """Adds the edge of a copy inside the host, at memory speed, which completes together with the leader's copy."""
        sender = self.pool.senders[leader]
        self._add_edge(target, [SourceAllocation(leader, min(sender.cap, self.nodes[target].into))])

    def _add_edge(self, target: str, allocations: Sequence[SourceAllocation]) -> None:
        total = sum(allocation.bytes_per_s for allocation in allocations)
        upstream = [self.pool.senders[allocation.store] for allocation in allocations if allocation.store != REMOTE]
        # No target is fed faster than the fastest of its sources receives.
        rate = max(min(total, max((sender.cap for sender in upstream), default=total)), MIN_BYTES_PER_S)
        delay_s = max((sender.delay_s for sender in upstream), default=0.0) + self._fill_s(rate) / _CHUNKS
        ready_s = max(delay_s + self._fill_s(rate), *(sender.ready_s for sender in upstream), 0.0)
        striped = tuple(allocation.store for allocation in allocations)
        shares = tuple(allocation.bytes_per_s / total for allocation in allocations)
        edge = TransferEdge(target, striped, False, len(striped), shares, rate, ready_s if self.num_bytes else 0.0)
        self._edges.append(edge)
        self.pool.add(target, self.nodes[target], rate, ready_s, delay_s)
        self.began.append(target)

    def edges(self, already: Sequence[str]) -> tuple[TransferEdge, ...]:
        """All edges with their alternates, beginning with stores that already have or receive the pack."""
        rank = {store: number for number, store in enumerate(self.began)}
        there = [TransferEdge(target, (), True, whole=target in self.whole) for target in already]
        return tuple(
            replace(edge, sources=(*edge.sources, *self._alternates(edge.target, edge.sources, rank)))
            for edge in (*there, *self._edges)
        )

    def _alternates(self, target: str, striped: Sequence[str], rank: Mapping[str, int]) -> tuple[str, ...]:
        """Alternates of a target: whole holders, then stores before the target, nearest first, then a store after it,
        last the remote store.

        The head of a chain out of the remote store has no alternates, because all others get the pack through it.
        """
        if REMOTE in striped:
            return ()
        place = rank.get(target, 0)
        taken = {target, *striped}
        before = [store for store in self.whole[: MAX_ALTERNATES + len(taken)] if store not in taken]
        nearest = self.began[max(place - MAX_ALTERNATES - len(taken), 0) : place]
        before += [store for store in reversed(nearest) if store not in taken]
        later = self.began[place + 1 : place + 1 + _NUM_DOWNSTREAM_ALTERNATES] if target in rank else []
        chosen = [*before[: MAX_ALTERNATES - len(later)], *later]
        return (*chosen, REMOTE)
