"""Tickets for the data plane: who may read what from whom. Only the scheduler holds the cluster key.

Expiry is by this clock and checked by the holders': lifetimes are long beside any skew.
"""

from __future__ import annotations

import time

from torchrelay.control.v1.types_pb2 import Source, Ticket
from torchrelay.scheduler.policy.core import REMOTE, Placement, StoreStatus
from torchrelay.transfer.protocol.tickets import TicketIssuer

_KV_TICKET_S = 3600.0  # a receiver that resumes may reuse it until then
_RELAY_TICKET_S = 3600.0  # alternates are for repair while the scheduler is away


class ClusterTickets:
    """Issues tickets for placements and relays."""

    def __init__(self, cluster_key: bytes) -> None:
        self._issuer = TicketIssuer(cluster_key)

    def kv(self, placement: Placement) -> Ticket | None:
        """Lets the decode worker follow the prefill worker's KV buffer; None if they are the same worker."""
        if not placement.needs_kv_transfer:
            return None
        holder, receiver = placement.prefill.worker_id, placement.decode.worker_id
        return self._issuer.issue(placement.key.buffer_id, holder, receiver, _expiry_ms(_KV_TICKET_S))

    def source(self, pack_id: str, holder: StoreStatus | None, receiver_id: str) -> Source:
        """A source from which a store can follow a pack; ``holder`` None: the remote store."""
        if holder is None:
            return Source(holder_id=REMOTE)
        ticket = self._issuer.issue(pack_id, holder.store_id, receiver_id, _expiry_ms(_RELAY_TICKET_S))
        return Source(holder_id=holder.store_id, data_address=holder.data_address, ticket=ticket)


def _expiry_ms(lifetime_s: float) -> int:
    return int((time.time() + lifetime_s) * 1000)
