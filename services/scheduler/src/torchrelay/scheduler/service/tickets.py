"""Tickets for the data plane, which allow a receiver to read from a holder, and tokens to call workers.

Only the scheduler holds the cluster key. It sets expiry by its own clock, and holders check it by theirs, so lifetimes
are long compared with any clock skew.
"""

from __future__ import annotations

import time
from typing import Any

from torchrelay.common.identity.callers import Caller, call_token
from torchrelay.common.identity.keys import derive_node_key
from torchrelay.common.recent import Recent
from torchrelay.control.v1.types_pb2 import Source
from torchrelay.scheduler.policy.types import REMOTE, Placement, StoreStatus
from torchrelay.scheduler.service.converters import CallTokens
from torchrelay.transfer.protocol.tickets import TicketIssuer

_MAX_WORKERS = 16_384
_TICKET_S = 3600.0  # until then a receiver that resumes reuses it, and a store repairs while the scheduler is away


class ClusterTickets:
    """Issues tickets for placements and relays, and the tokens of placements."""

    def __init__(self, cluster_key: bytes) -> None:
        self._cluster_key = cluster_key
        self._issuer = TicketIssuer(cluster_key)
        self._call_tokens: Recent[str, CallTokens] = Recent(_MAX_WORKERS)

    def call_tokens(self, worker_id: str) -> CallTokens:
        """Tokens that let the gateway and other workers call the worker."""
        tokens = self._call_tokens.get(worker_id)
        if tokens is None:
            node_key = derive_node_key(self._cluster_key, worker_id)
            tokens = call_token(node_key, Caller.GATEWAY), call_token(node_key, Caller.WORKER)
            self._call_tokens[worker_id] = tokens
        return tokens

    def kv(self, placement: Placement) -> dict[str, Any] | None:
        """Fields of a ticket that lets the decode worker follow the prefill worker's KV buffer; None if it is the same
        worker.
        """
        if not placement.needs_kv_transfer:
            return None
        holder, receiver = placement.prefill.worker_id, placement.decode.worker_id
        return self._issuer.issue_fields(placement.key.buffer_id, holder, receiver, _expiry_ms())

    def prompt(self, placement: Placement) -> dict[str, Any] | None:
        """Fields of a ticket that lets the prefill worker export the prompt from its source; None without a source."""
        if (source := placement.prompt_source) is None:
            return None
        holder, receiver = source.worker.worker_id, placement.prefill.worker_id
        return self._issuer.issue_fields(f"{source.key.buffer_id}/prompt", holder, receiver, _expiry_ms())

    def source(self, pack_id: str, holder: StoreStatus | None, receiver_id: str) -> Source:
        """A source from which a store can follow a pack; ``holder`` None: the remote store."""
        if holder is None:
            return Source(holder_id=REMOTE)
        ticket = self._issuer.issue(pack_id, holder.store_id, receiver_id, _expiry_ms())
        return Source(holder_id=holder.store_id, data_address=holder.data_address, ticket=ticket)


def _expiry_ms() -> int:
    return int((time.time() + _TICKET_S) * 1000)
