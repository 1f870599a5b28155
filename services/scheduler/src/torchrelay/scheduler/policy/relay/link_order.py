"""Order of loads on a link that cannot carry all of them: the sooner a load is due, the earlier it goes.

A load is due at the deadline of the request that waits for it, but not before it could complete alone. The transfers on
one direction of a host's link take their rates in the order in which they are due. A transfer for which those of other
packs leave too little *yields*: its store runs it in the class of idle copies, which takes only the bandwidth that
others leave. When another transfer ends, the order is decided again.

Of loads that begin together the shortest is due first, so each ends no later than with equal shares. No load waits for
ever, because later loads are due later (compare Friedman and Henderson, "Fairness and efficiency in web server
protocols", SIGMETRICS 2003, who order by the end times under equal shares).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torchrelay.scheduler.policy.core import REMOTE, StoreStatus
from torchrelay.scheduler.policy.relay.transfers import Transfer

_ENOUGH_SHARE = 0.95  # this share of the planned rate counts as all of it: capacities are not known more accurately


class Direction(NamedTuple):
    """A direction of the link of a store's host."""

    store_id: str
    is_out: bool


@dataclass(frozen=True)
class LinkOrder:
    """The order at one moment. Link capacity is unknown at the first plans, and later changes for all transfers
    alike.
    """

    usual_bytes_per_s: float  # rate of an otherwise unused link
    stores: Mapping[str, StoreStatus]

    def due(self, transfer: Transfer) -> float:
        return self.due_of(transfer.deadline, transfer.planned_at, transfer.pack_bytes)

    def due_of(self, deadline: float, planned_at: float, pack_bytes: int) -> float:
        """Time at which a load is due."""
        return max(deadline, planned_at + pack_bytes / self.usual_bytes_per_s)

    def place(self, transfer: Transfer) -> tuple[float, int]:
        """Sort key in the order: sooner due first, then older first."""
        return self.due(transfer), transfer.rank

    def leaves(self, transfer: Transfer, due: float) -> bool:
        """Whether the transfer yields to an urgent transfer that is due at ``due``."""
        return not transfer.urgent or (is_ordered(transfer) and self.due(transfer) > due)

    def rates(self, transfer: Transfer) -> dict[Direction, float]:
        """Rates by direction, the higher of planned and measured. The remote store's link is left out, as unknown."""
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
        """Whether transfers that are due sooner leave too little for this transfer. ``on``: transfers of a direction;
        ``free_bytes_per_s``: its capacity without background traffic.
        """
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
    """Whether the transfer has a place in the order: a request waits for it, and its plan predicts a rate."""
    return transfer.deadline < math.inf and transfer.planned_bytes_per_s > 0
