"""Which loads go first where a link cannot carry all of them: those that are due sooner.

A load is due at the deadline of the request that it is for, but not before it could be there alone. Of the transfers
on one direction of a host's link each takes its rate, in the order in which they are due; one for which other packs
leave too little *yields*: its store follows in the class of idle copies, which takes only what others leave. As soon as
one of the others has ended it is decided anew.

Of loads that begin together the shortest is due first, so each ends no later than if all shared alike; and no load
waits for ever, as later loads are due later (compare Friedman and Henderson, "Fairness and efficiency in web server
protocols", SIGMETRICS 2003, who order by when each would have ended if all shared alike).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torchrelay.scheduler.policy.core import REMOTE, StoreStatus
from torchrelay.scheduler.policy.relay.transfers import Transfer

_ENOUGH_SHARE = 0.95  # of the planned rate counts as all of it: what links carry is not known better


class Direction(NamedTuple):
    """A direction of the link of a store's host."""

    store_id: str
    is_out: bool


@dataclass(frozen=True)
class LinkOrder:
    """The order at this moment. The capacity of links is unknown when the first plans are made, and then changes for
    all transfers alike.
    """

    usual_bytes_per_s: float  # of a link that nobody else uses
    stores: Mapping[str, StoreStatus]

    def due(self, transfer: Transfer) -> float:
        return self.due_of(transfer.deadline, transfer.planned_at, transfer.pack_bytes)

    def due_of(self, deadline: float, planned_at: float, pack_bytes: int) -> float:
        """When a load is wanted."""
        return max(deadline, planned_at + pack_bytes / self.usual_bytes_per_s)

    def place(self, transfer: Transfer) -> tuple[float, int]:
        """The lower, the sooner it is due; of those due at once the older."""
        return self.due(transfer), transfer.rank

    def leaves(self, transfer: Transfer, due: float) -> bool:
        """Whether it leaves to an urgent one that is due then what that can take."""
        return not transfer.urgent or (is_ordered(transfer) and self.due(transfer) > due)

    def rates(self, transfer: Transfer) -> dict[Direction, float]:
        """The planned rates, or the measured ones if they are higher. The remote store's link is unknown."""
        store = self.stores.get(transfer.target)
        copy = store.copies.get(transfer.pack_id) if store is not None else None
        taken = {share.holder_id: share.bytes_per_s for share in copy.shares} if copy is not None else {}
        sent = {
            Direction(source.holder_id, True): max(source.bytes_per_s, taken.get(source.holder_id, 0.0))
            for source in transfer.sources
            if source.holder_id != REMOTE
        }
        return sent | {Direction(transfer.target, False): max(transfer.planned_bytes_per_s, sum(taken.values()))}

    def has_to_yield(
        self,
        transfer: Transfer,
        on: Callable[[Direction], Iterable[Transfer]],
        free_bytes_per_s: Callable[[Direction], float],
    ) -> bool:
        """``on``: the transfers of a direction; ``free_bytes_per_s``: its capacity without background traffic."""
        place = self.place(transfer)
        for direction, rate in self.rates(transfer).items():
            taken = sum(
                self.rates(other)[direction]
                for other in on(direction)
                if is_ordered(other)
                and not other.yields
                and other.pack_id != transfer.pack_id
                and self.place(other) < place
            )
            if taken and taken + rate * _ENOUGH_SHARE > free_bytes_per_s(direction):
                return True
        return False


def is_ordered(transfer: Transfer) -> bool:
    """Whether it has a place in the order: a request waits for it, and its plan predicts a rate."""
    return transfer.deadline < math.inf and transfer.planned_bytes_per_s > 0
