"""Plans one pack's relay without side effects: which store follows which others, by the rates left on their links.

All stores receive the chunks in one order, so a store can feed only stores behind it: they form a chain, the fastest
first, and the rates of the first k targets add up to at most what the sources and the first k - 1 targets send. Among
all such rates the max-min fair ones are chosen: each target gets what its link takes in, or else the *fair rate*, the
highest that all targets with faster links can have. For the slowest target, hence for the time until all are complete,
this is optimal, except that the last of the chain sends to nobody; Mutualcast (Li, Chou, Zhang 2005) reaches the bound
by the same sharing of uplinks, without an order of chunks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from torchrelay.common.quantities import format_duration
from torchrelay.scheduler.policy.types import REMOTE

DEFAULT_BYTES_PER_S = 5e8  # for a direction without measurements
MAX_STRIPED = 4  # sources followed at once
MAX_ALTERNATES = 4  # besides the striped sources and the remote store
_MIN_BYTES_PER_S = 1.0  # for a full direction, which a new relay still shares
_MAX_SENDERS = 64  # considered for a target, of those with most left
_ENOUGH_SHARE = 0.999  # of the need counts as all of it
_MIN_STRIPE_SHARE = 0.02  # of the need; less is not worth a stripe
_CHUNKS = 256  # chunks of a pack, by its layout: a host is a chunk behind its source
_SIMILAR_RATES = 1.25  # rates within this factor count as equal
_ROUNDS = 24  # of bisection: exact to less than a millionth
_SLACK = 1 + 1e-9


@dataclass(frozen=True)
class TransferEdge:
    """A store's incoming copy. The first ``num_striped`` of ``sources`` are followed at once, each at the rate that it
    achieves; the others are for repair, best first, the remote store last.

    ``shares``: the planned share of the pack from each striped source; they add up to 1. ``bytes_per_s`` and
    ``ready_s`` (from the start of the plan) are predictions; 0 without a prediction.
    """

    target: str
    sources: tuple[str, ...]
    already_there: bool = False  # the copy is present or on its way, and nothing new is transferred
    num_striped: int = 1
    shares: tuple[float, ...] = (1.0,)
    bytes_per_s: float = 0.0
    ready_s: float = 0.0
    whole: bool = False  # already there and complete

    @property
    def upstream(self) -> str:
        return self.sources[0]

    @property
    def striped(self) -> tuple[str, ...]:
        return self.sources[: self.num_striped]

    @property
    def rates(self) -> dict[str, float]:
        """The planned rates of the striped sources."""
        return {source: share * self.bytes_per_s for source, share in zip(self.striped, self.shares, strict=True)}

    def __str__(self) -> str:
        """Text such as ``s3 from s1 60 % and s2 40 % at 480 MB/s, ready in 900 ms``."""
        if self.already_there:
            return f"{self.target} " + ("from its host copy" if self.whole else "by a relay under way already")
        parts = zip(self.striped, self.shares, strict=True)
        origin = " and ".join(f"{source} {share * 100:.0f} %" for source, share in parts)
        text = f"{self.target} from {self.upstream if self.num_striped == 1 else origin}"
        speed = f" at {self.bytes_per_s / 1e6:.3g} MB/s, ready in {format_duration(self.ready_s)}"
        return text + speed if self.ready_s else text


@dataclass(frozen=True, slots=True)
class Node:
    """A store's link. A residual is the rate left for a new relay in a direction, in bytes per second: capacity less KV
    streams, other background traffic and the running relays that do not yield to it.
    """

    residual_out: float = DEFAULT_BYTES_PER_S
    residual_in: float = DEFAULT_BYTES_PER_S
    host: str = ""  # stores of one host share its network copy; empty: alone on its host
    busy_out: bool = False  # it sends KV or other relays' chunks; used only if no free node suffices
    leaf: str = ""  # the switch of the host; hosts of one leaf reach each other without its uplink

    @property
    def out(self) -> float:
        return max(self.residual_out, _MIN_BYTES_PER_S)

    @property
    def into(self) -> float:
        return max(self.residual_in, _MIN_BYTES_PER_S)


@dataclass(frozen=True, slots=True)
class ReceiveProgress:
    """Progress of an incoming copy."""

    have: float = 0.0  # part of the pack, 0 to 1
    bytes_per_s: float = DEFAULT_BYTES_PER_S

    @property
    def serves_bytes_per_s(self) -> float:
        """The rate of a follower that begins now and gets the whole pack by the time this copy is complete."""
        missing = 1.0 - self.have
        return max(self.bytes_per_s, _MIN_BYTES_PER_S) / missing if missing > 0 else math.inf


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
    known, wanted = dict.fromkeys((*whole, *receiving)), dict.fromkeys(targets)
    nodes = {store: (nodes or {}).get(store, Node()) for store in (*known, *wanted, REMOTE)}
    chain = _Chain(nodes, whole, num_bytes)
    for store in receiving:
        chain.add_receiving(store, (arriving or {}).get(store, ReceiveProgress()))
    copy_of_host: dict[str, str] = {}  # a host gets one network copy, which its other targets follow
    leader_of = {store: copy_of_host.setdefault(nodes[store].host or store, store) for store in (*known, *wanted)}
    leaders = [target for target in wanted if target not in known and leader_of[target] == target]
    chain.feed([target for target in leaders if target not in live])
    chain.feed([target for target in leaders if target in live])
    for target in wanted:
        if target not in known and leader_of[target] != target:
            chain.fan_out(target, leader_of[target])
    return chain.edges([target for target in wanted if target in known])


@dataclass(slots=True, eq=False)
class _Sender:
    """A store that has the pack or is getting it. ``cap``: its own incoming rate; no follower can be faster."""

    store: str
    place: int  # in the chain
    node: Node
    cap: float
    ready_s: float
    delay_s: float  # until its first chunk has arrived
    left: float
    offer: float  # the rate that it can send to one target
    is_busy: bool
    num_followers: int = 0

    def send(self, bytes_per_s: float) -> None:
        """Adds a follower."""
        self.left -= bytes_per_s
        self.offer = max(min(self.left, self.cap), 0.0)
        self.is_busy = True
        self.num_followers += 1


class _Chain:
    """Stores in the order in which the pack passes them, and the edges so far."""

    def __init__(self, nodes: Mapping[str, Node], whole: Sequence[str], num_bytes: float) -> None:
        self._nodes, self._whole, self._num_bytes = nodes, tuple(whole), num_bytes
        self._senders: dict[str, _Sender] = {}  # whole stores, then the others, each before the stores that it may feed
        self._open: list[_Sender] = []  # the senders with most left, oldest first
        self._edges: list[
            tuple[str, Mapping[str, float], float, float]
        ] = []  # targets, rates of sources, rate, ready_s
        for store in whole:
            self._add(store, math.inf, 0.0)

    def add_receiving(self, store: str, progress: ReceiveProgress) -> None:
        self._add(store, progress.serves_bytes_per_s, self._transfer_s(progress.serves_bytes_per_s))

    def _transfer_s(self, bytes_per_s: float) -> float:
        return self._num_bytes / max(bytes_per_s, _MIN_BYTES_PER_S)

    def _add(self, store: str, cap: float, ready_s: float, delay_s: float = 0.0) -> None:
        node = self._nodes[store]
        offer = min(node.out, cap)
        sender = _Sender(store, len(self._senders), node, cap, ready_s, delay_s, node.out, offer, node.busy_out)
        self._senders[store] = sender
        self._open.append(sender)
        if len(self._open) > _MAX_SENDERS:
            self._open.remove(min(self._open, key=attrgetter("left")))

    def feed(self, wave: Sequence[str]) -> None:
        """Adds the edges of targets that are fed together."""
        if not wave:
            return
        nodes, senders = self._nodes, list(self._senders.values())
        members = [_Member(nodes[target].into, nodes[target].out) for target in wave]
        members += [_Member(sender.cap, sender.left, 0) for sender in senders[len(self._whole) :]]
        members.sort(key=lambda member: (-member.into, member.takes))
        sent = sum(sender.left for sender in senders[: len(self._whole)])
        if not senders:  # the remote store heads one chain: one target reads it, even if it could send more
            sent = min(nodes[REMOTE].out, members[0].into)
        rate = _fair_rate(sent, members)
        needs = {target: max(min(nodes[target].into, rate), _MIN_BYTES_PER_S) for target in wave}
        leaves = {sender.node.leaf for sender in senders}

        def place(target: str) -> tuple[int, bool, str, float, float]:
            """The fastest first, and among equals the better sender. Targets of similar rates are grouped by leaf,
            beginning with a leaf that has the pack.
            """
            need, node = needs[target], nodes[target]
            return -int(math.log(need, _SIMILAR_RATES)), node.leaf not in leaves, node.leaf, -need, -node.out

        for target in sorted(wave, key=place):
            rates = self._allocate(needs[target], nodes[target].leaf)
            self._add_edge(target, rates or {REMOTE: min(nodes[REMOTE].out, needs[target])})

    def _allocate(self, need: float, leaf: str) -> dict[str, float]:
        """Rates of up to ``MAX_STRIPED`` sources that send ``need`` together, or less where no more is left."""
        rates: dict[str, float] = {}
        missing = need
        while len(rates) < MAX_STRIPED and missing > need * _MIN_STRIPE_SHARE:
            sender = self._best_sender(missing, leaf, rates)
            if sender is None or (rates and sender.offer < need * _MIN_STRIPE_SHARE):
                break
            rates[sender.store] = rate = min(sender.offer, missing)
            sender.send(rate)
            missing -= rate
        if len(rates) == 1 and sum(rates.values()) <= need * _MIN_STRIPE_SHARE:
            # All are busy: the direction is shared with those it already feeds.
            sender = self._senders[next(iter(rates))]
            share = min(need, sender.cap, sender.node.out / sender.num_followers)
            rates = {sender.store: max(share, _MIN_BYTES_PER_S)}
        return rates

    def _best_sender(self, need: float, leaf: str, without: Container[str]) -> _Sender | None:
        """The sender that has just enough left, else the one with most. Idle senders come before busy ones, and the
        target's own leaf before others.
        """
        others = [sender for sender in self._open if sender.store not in without]
        if enough := [sender for sender in others if sender.offer >= need * _ENOUGH_SHARE]:
            idle = [sender for sender in enough if not sender.is_busy] or enough
            near = [sender for sender in idle if sender.node.leaf == leaf] or idle
            return min(near, key=attrgetter("left"))
        most = max([sender.offer for sender in others], default=0.0)
        largest = [sender for sender in reversed(others) if sender.offer == most]
        return max(largest, key=lambda each: (each.node.leaf == leaf, not each.is_busy, each.left), default=None)

    def fan_out(self, target: str, leader: str) -> None:
        """Adds the edge of a copy inside the host, at memory speed, which completes together with the leader's copy."""
        self._add_edge(target, {leader: min(self._senders[leader].cap, self._nodes[target].into)})

    def _add_edge(self, target: str, rates: Mapping[str, float]) -> None:
        """Adds the edge that feeds the target from these sources, at these rates."""
        total = sum(rates.values())
        upstream = [self._senders[source] for source in rates if source != REMOTE]
        # No target is fed faster than the fastest of its sources receives.
        rate = max(min(total, max((sender.cap for sender in upstream), default=total)), _MIN_BYTES_PER_S)
        delay_s = max((sender.delay_s for sender in upstream), default=0.0) + self._transfer_s(rate) / _CHUNKS
        ready_s = max(delay_s + self._transfer_s(rate), *(sender.ready_s for sender in upstream), 0.0)
        self._edges.append((target, rates, rate, ready_s if self._num_bytes else 0.0))
        self._add(target, rate, ready_s, delay_s)

    def edges(self, already: Sequence[str]) -> tuple[TransferEdge, ...]:
        """All edges with their alternates, beginning with stores that already have or receive the pack."""
        order = list(self._senders)
        edges = []
        for target in already:
            sources = self._alternates(target, (), order)
            edges.append(TransferEdge(target, sources, True, whole=target in self._whole))
        for target, rates, bytes_per_s, ready_s in self._edges:
            sources, total = (*rates, *self._alternates(target, rates, order)), sum(rates.values())
            shares = tuple(rate / total for rate in rates.values())
            edges.append(TransferEdge(target, sources, False, len(rates), shares, bytes_per_s, ready_s))
        return tuple(edges)

    def _alternates(self, target: str, striped: Container[str], order: Sequence[str]) -> tuple[str, ...]:
        """Whole stores, then stores before the target, nearest first, then a store after it, last the remote store.

        The head of a chain out of the remote store has none, because all others get the pack through it.
        """
        if REMOTE in striped:
            return ()
        few = MAX_ALTERNATES + MAX_STRIPED + 1  # enough, even if some of them are the target and its sources
        num_whole, place = len(self._whole), self._senders[target].place
        nearest = order[max(place - few, num_whole) : place]
        later = order[place + 1 : place + 2] if place >= num_whole else []
        before = (
            store for store in (*self._whole[:few], *reversed(nearest)) if store != target and store not in striped
        )
        return (*islice(before, MAX_ALTERNATES - len(later)), *later, REMOTE)


class _Member(NamedTuple):
    """A host of the chain. ``takes``: 0 if it is being fed already."""

    into: float  # its incoming rate, which bounds what it can pass on
    out: float
    takes: int = 1


def _fair_rate(sent: float, members: Sequence[_Member]) -> float:
    """Bytes per second. ``sent``: what the whole stores send; ``members``: by ``into``, the fastest first."""
    low, high = 0.0, next(member.into for member in members if member.into < math.inf)
    if _is_feasible(high, sent, members):
        return high
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if _is_feasible(middle, sent, members) else (low, middle)
    return low


def _is_feasible(rate: float, sent: float, members: Sequence[_Member]) -> bool:
    """Whether all can have this rate, or what their link takes in if that is less."""
    fast = [member for member in members if member.into >= rate]
    fed = [member.out for member in fast if member.takes]
    first = sent + sum(member.out for member in fast if not member.takes)  # sent before any target of this rate
    given, taken = first + sum(fed), rate * len(fed)
    # Targets of this rate are ordered by outgoing rate, so only the ends of their part of the chain can fail.
    if fed and (rate > first * _SLACK or taken > (given - min(fed)) * _SLACK):
        return False
    for member in members[len(fast) :]:
        taken += member.into * member.takes
        if taken > given * _SLACK:
            return False
        given += member.out
    return True
