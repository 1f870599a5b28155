"""What the hosts that have the pack, or get it, can still send: taken from piece by piece as arrows are drawn."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from torchrelay.scheduler.planning.nodes import MIN_BYTES_PER_S, Node, Uplink

_ALL = "*"  # no leaf: every sender
_ENOUGH_SHARE = 0.999  # so close to the need counts as enough
_MIN_STRIPE_SHARE = 0.02  # less of the need than this is not worth a stripe
_MAX_CANDIDATES = 8  # sources behind a full uplink that are passed over before the need is met elsewhere


@dataclass(slots=True)
class Sender:
    """A store that has the pack or gets it. ``cap``: the rate at which it gets it; no follower can be fed faster."""

    node: Node
    cap: float
    left: float
    rank: int  # of its coming
    ready_s: float
    delay_s: float  # until its first chunk is there
    num_followers: int = 0

    @property
    def idle(self) -> bool:
        return not self.num_followers and not self.node.busy_out


@dataclass(frozen=True, slots=True)
class SourceAllocation:
    """What a target gets from one source."""

    store: str
    bytes_per_s: float


class _SortedSenders:
    """Stores sorted by what they have left; of equal ones the first to come, so that chains stay short."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, str]] = []

    def add(self, store: str, sender: Sender) -> None:
        insort(self._entries, (sender.left, sender.rank, store))

    def remove(self, store: str, sender: Sender) -> None:
        del self._entries[bisect_left(self._entries, (sender.left, sender.rank, store))]

    def from_least(self, need: float) -> Iterator[str]:
        """Those that have ``need`` or more, the least first."""
        start = bisect_left(self._entries, (need,))
        return (self._entries[index][2] for index in range(start, len(self._entries)))

    def from_most(self) -> Iterator[str]:
        return (store for _, _, store in reversed(self._entries))


class SenderPool:
    """Finding a source costs the logarithm of the number of senders. A direction that carries nothing else comes before
    one that would be shared, and the own leaf before others.
    """

    def __init__(self, uplinks: Mapping[str, Uplink]) -> None:
        self.senders: dict[str, Sender] = {}
        self._shelves: defaultdict[tuple[str, bool], _SortedSenders] = defaultdict(
            _SortedSenders
        )  # by leaf and idleness; "*": all
        self._leaves: set[str] = set()
        self._up = {leaf: uplink.residual_up for leaf, uplink in uplinks.items()}
        self._down = {leaf: uplink.residual_down for leaf, uplink in uplinks.items()}

    def add(self, store: str, node: Node, cap: float = math.inf, ready_s: float = 0.0, delay_s: float = 0.0) -> None:
        sender = Sender(node, cap, node.out, len(self.senders), ready_s, delay_s)
        self.senders[store] = sender
        self._leaves.add(node.leaf)
        for shelf in self._shelves_of(sender):
            shelf.add(store, sender)

    def _shelves_of(self, sender: Sender) -> Iterable[_SortedSenders]:
        return self._shelves[(sender.node.leaf, sender.idle)], self._shelves[(_ALL, sender.idle)]

    def allocate(self, need: float, leaf: str, most: int) -> list[SourceAllocation]:
        """Sources that bring ``need`` between them, ``most`` at most: one that has just enough left, else those that
        have most. Less comes when there is not more; empty: there is nobody.
        """
        allocations: list[SourceAllocation] = []
        missing = need
        while self.senders and len(allocations) < most and missing > need * _MIN_STRIPE_SHARE:
            without = {draw.store for draw in allocations}
            found = self._enough(missing, leaf, without) or self._most(missing, leaf, without)
            if found is None or (allocations and found.bytes_per_s < need * _MIN_STRIPE_SHARE):
                break
            self._take(found, leaf)
            allocations.append(found)
            missing -= found.bytes_per_s
        if len(allocations) == 1 and allocations[0].bytes_per_s <= need * _MIN_STRIPE_SHARE:
            # Everyone is busy: the direction will be shared with those it feeds already.
            sender = self.senders[allocations[0].store]
            share = min(need, sender.cap, sender.node.out / sender.num_followers)
            allocations = [SourceAllocation(allocations[0].store, max(share, MIN_BYTES_PER_S))]
        return allocations

    def _enough(self, need: float, leaf: str, without: Container[str]) -> SourceAllocation | None:
        places = (leaf, _ALL) if len(self._leaves) > 1 else (_ALL,)
        for idle in (True, False):
            for place in places:
                for store in islice(self._shelves[(place, idle)].from_least(need * _ENOUGH_SHARE), _MAX_CANDIDATES):
                    rate = self._rate(store, need, leaf)
                    if rate >= need * _ENOUGH_SHARE and store not in without:
                        return SourceAllocation(store, rate)
        return None

    def _most(self, need: float, leaf: str, without: Container[str]) -> SourceAllocation | None:
        places = (leaf, _ALL) if len(self._leaves) > 1 else (_ALL,)
        found = [
            SourceAllocation(store, self._rate(store, need, leaf))
            for place in places
            for idle in (True, False)
            for store in islice(self._shelves[(place, idle)].from_most(), _MAX_CANDIDATES)
            if store not in without
        ]
        return max(found, key=lambda draw: draw.bytes_per_s, default=None)

    def _rate(self, store: str, need: float, leaf: str) -> float:
        sender = self.senders[store]
        rate = min(sender.left, sender.cap, need)
        if sender.node.leaf != leaf:
            rate = min(rate, self._up.get(sender.node.leaf, math.inf), self._down.get(leaf, math.inf))
        return max(rate, 0.0)

    def _take(self, draw: SourceAllocation, leaf: str) -> None:
        sender = self.senders[draw.store]
        for shelf in self._shelves_of(sender):
            shelf.remove(draw.store, sender)
        sender.left -= draw.bytes_per_s
        sender.num_followers += 1
        for shelf in self._shelves_of(sender):
            shelf.add(draw.store, sender)
        if sender.node.leaf != leaf:
            for room, crossed in ((self._up, sender.node.leaf), (self._down, leaf)):
                if crossed in room:
                    room[crossed] -= draw.bytes_per_s
