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
from torchrelay.scheduler.policy.types import REMOTE, Placement, StoreStatus, WorkerRef
from torchrelay.scheduler.service.admit_streams import EventFields
from torchrelay.transfer.protocol.tickets import TicketIssuer

_MAX_WORKERS = 16_384
_TICKET_S = 3600.0  # until then a receiver that resumes reuses it, and a store repairs while the scheduler is away


class ClusterTickets:
    """Issues tickets for placements and relays, and the tokens of placements."""

    def __init__(self, cluster_key: bytes) -> None:
        self._cluster_key = cluster_key
        self._issuer = TicketIssuer(cluster_key)
        self._tokens: Recent[str, dict[str, str]] = Recent(_MAX_WORKERS)  # by worker

    def placed(self, placement: Placement) -> EventFields:
        """A placement with the tokens of its workers, and with the tickets by which the decode worker follows the KV
        buffer of another worker, and the prefill worker gets the prompt from its source.
        """
        prefill_id = placement.prefill.worker_id
        placed: dict[str, Any] = {
            "key": placement.key._asdict(),
            "prefill": self._worker_fields(placement.prefill),
            "decode": self._worker_fields(placement.decode),
            "cold": placement.cold,
        }
        if placement.needs_kv_transfer:
            receiver_id = placement.decode.worker_id
            placed["kv_ticket"] = self._issuer.issue_fields(
                placement.key.buffer_id, prefill_id, receiver_id, _expiry_ms()
            )
        if (source := placement.prompt_source) is not None:
            buffer_id, holder_id = f"{source.key.buffer_id}/prompt", source.worker.worker_id
            placed["prompt_source"] = {
                "key": source.key._asdict(),
                "worker": self._worker_fields(source.worker),
                "ticket": self._issuer.issue_fields(buffer_id, holder_id, prefill_id, _expiry_ms()),
                "wait_ms": round(source.wait_s * 1000),
            }
        return {"placement": placed}

    def _worker_fields(self, ref: WorkerRef) -> dict[str, str]:
        """A worker with the tokens that let the gateway and other workers call it."""
        tokens = self._tokens.get(ref.worker_id)
        if tokens is None:
            node_key = derive_node_key(self._cluster_key, ref.worker_id)
            tokens = self._tokens[ref.worker_id] = {
                "gateway_token": call_token(node_key, Caller.GATEWAY),
                "worker_token": call_token(node_key, Caller.WORKER),
            }
        return {
            "worker_id": ref.worker_id,
            "grpc_address": ref.grpc_address,
            "instance_id": ref.instance_id,
            **tokens,
        }

    def source(self, pack_id: str, holder: StoreStatus | None, receiver_id: str) -> Source:
        """A source from which a store can follow a pack; ``holder`` None: the remote store."""
        if holder is None:
            return Source(holder_id=REMOTE)
        ticket = self._issuer.issue(pack_id, holder.store_id, receiver_id, _expiry_ms())
        return Source(holder_id=holder.store_id, data_address=holder.data_address, ticket=ticket)


def _expiry_ms() -> int:
    return int((time.time() + _TICKET_S) * 1000)
