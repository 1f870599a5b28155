"""The stores that have the pack or are getting it, with the rate that each can still send."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product

from torchrelay.scheduler.policy.relay.planning.nodes import MIN_BYTES_PER_S, Node

_ALL = "*"  # in the place of a leaf: every sender
_ENOUGH_SHARE = 0.999  # of the need counts as all of it
_MIN_STRIPE_SHARE = 0.02  # of the need; less is not worth a stripe
_MAX_CANDIDATES = 8  # looked at per index: a sender may be capped below what it has left


@dataclass(slots=True)
class Sender:
    """A store that has the pack or is getting it. ``cap``: its own incoming rate; no follower can be faster."""

    node: Node
    cap: float
    left: float
    rank: int  # in the order of the chain
    ready_s: float
    delay_s: float  # until its first chunk has arrived
    num_followers: int = 0

    @property
    def idle(self) -> bool:
        return not self.num_followers and not self.node.busy_out


@dataclass(frozen=True, slots=True)
class SourceAllocation:
    """The rate at which a source sends to a target."""

    store: str
    bytes_per_s: float


class _SortedSenders:
    """Stores sorted by what they have left; equal ones by rank, so that chains stay short."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, str]] = []

    def add(self, store: str, sender: Sender) -> None:
        insort(self._entries, (sender.left, sender.rank, store))

    def remove(self, store: str, sender: Sender) -> None:
        del self._entries[bisect_left(self._entries, (sender.left, sender.rank, store))]

    def from_least(self, need: float) -> Iterator[str]:
        """Stores with ``need`` or more left, the least first."""
        start = bisect_left(self._entries, (need,))
        return (self._entries[index][2] for index in range(start, len(self._entries)))

    def from_most(self) -> Iterator[str]:
        return (store for _, _, store in reversed(self._entries))


class SenderPool:
    """Finds a source in time logarithmic in the number of senders. Idle directions come before busy ones, the target's
    own leaf before others.
    """

    def __init__(self) -> None:
        self.senders: dict[str, Sender] = {}
        self._indexes = defaultdict[tuple[str, bool], _SortedSenders](_SortedSenders)  # by leaf and idleness
        self._leaves: set[str] = set()

    def add(self, store: str, node: Node, cap: float = math.inf, ready_s: float = 0.0, delay_s: float = 0.0) -> None:
        sender = Sender(node, cap, node.out, len(self.senders), ready_s, delay_s)
        self.senders[store] = sender
        self._leaves.add(node.leaf)
        for index in self._indexes_of(sender):
            index.add(store, sender)

    def _indexes_of(self, sender: Sender) -> Iterable[_SortedSenders]:
        return self._indexes[(sender.node.leaf, sender.idle)], self._indexes[(_ALL, sender.idle)]

    def allocate(self, need: float, leaf: str, most: int) -> list[SourceAllocation]:
        """Up to ``most`` sources that send ``need`` together: one that has just enough left, else those with most left.

        They send less than ``need`` where no more is left; empty: there is no sender.
        """
        allocations: list[SourceAllocation] = []
        missing = need
        places = (leaf, _ALL) if len(self._leaves) > 1 else (_ALL,)
        while self.senders and len(allocations) < most and missing > need * _MIN_STRIPE_SHARE:
            without = {allocation.store for allocation in allocations}
            best = self._enough(missing, places, without) or self._most(missing, places, without)
            if best is None or (allocations and best.bytes_per_s < need * _MIN_STRIPE_SHARE):
                break
            self._take(best)
            allocations.append(best)
            missing -= best.bytes_per_s
        if len(allocations) == 1 and allocations[0].bytes_per_s <= need * _MIN_STRIPE_SHARE:
            # All are busy: the direction is shared with those it already feeds.
            sender = self.senders[allocations[0].store]
            share = min(need, sender.cap, sender.node.out / sender.num_followers)
            allocations = [SourceAllocation(allocations[0].store, max(share, MIN_BYTES_PER_S))]
        return allocations

    def _enough(self, need: float, places: Sequence[str], without: Container[str]) -> SourceAllocation | None:
        for idle, place in product((True, False), places):
            for store in islice(self._indexes[(place, idle)].from_least(need * _ENOUGH_SHARE), _MAX_CANDIDATES):
                rate = self._rate(store, need)
                if rate >= need * _ENOUGH_SHARE and store not in without:
                    return SourceAllocation(store, rate)
        return None

    def _most(self, need: float, places: Sequence[str], without: Container[str]) -> SourceAllocation | None:
        candidates = [
            SourceAllocation(store, self._rate(store, need))
            for place, idle in product(places, (True, False))
            for store in islice(self._indexes[(place, idle)].from_most(), _MAX_CANDIDATES)
            if store not in without
        ]
        return max(candidates, key=lambda allocation: allocation.bytes_per_s, default=None)

    def _rate(self, store: str, need: float) -> float:
        sender = self.senders[store]
        return max(min(sender.left, sender.cap, need), 0.0)

    def _take(self, allocation: SourceAllocation) -> None:
        sender = self.senders[allocation.store]
        for index in self._indexes_of(sender):
            index.remove(allocation.store, sender)
        sender.left -= allocation.bytes_per_s
        sender.num_followers += 1
        for index in self._indexes_of(sender):
            index.add(allocation.store, sender)
