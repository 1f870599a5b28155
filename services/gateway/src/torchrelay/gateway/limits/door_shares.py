"""The shares of tenants in what the gateway's doors, REST and gRPC, have to give."""

from __future__ import annotations

from dataclasses import dataclass

from torchrelay.gateway.limits.shares import ShareLimits, Shares
from torchrelay.gateway.limits.tenant_lanes import TenantLanes
from torchrelay.gateway.settings import GatewaySettings

_MESSAGES_AT_ONCE = 4  # gRPC messages of one tenant that arrive at once, each of up to max_body_bytes
_LINES = 32  # tenants that can have a full line of queries or messages at once


@dataclass(frozen=True, slots=True)
class DoorShares:
    requests: Shares  # from the key to the last byte of the answer
    body_bytes: Shares  # of bodies in memory, until what they ask for is encoded
    uploads: Shares  # files that are being sent, and commits
    queries: TenantLanes  # lists and sums over tables
    messages: TenantLanes  # of gRPC, while they arrive


def door_shares(settings: GatewaySettings, queries_at_once: int = 1) -> DoorShares:
    """``queries_at_once``: connections that the database's pool can spare for queries."""
    requests = ShareLimits(
        "open requests",
        settings.max_open_requests,
        "max_open_requests",
        settings.max_open_requests_per_tenant,
        "max_open_requests_per_tenant",
    )
    body_bytes = ShareLimits(
        "bytes of request bodies in memory",
        settings.max_buffered_body_bytes,
        "max_buffered_body_bytes",
        settings.max_buffered_body_bytes_per_tenant,
        "max_buffered_body_bytes_per_tenant",
    )
    uploads = ShareLimits(
        "uploads of files under way",
        settings.max_uploads,
        "max_uploads",
        settings.max_uploads_per_tenant,
        "max_uploads_per_tenant",
    )
    queries = ShareLimits(
        "queries under way",
        settings.max_queries_per_tenant * _LINES,
        "max_queries_per_tenant",
        settings.max_queries_per_tenant,
        "max_queries_per_tenant",
    )
    messages = ShareLimits(
        "messages arriving",
        settings.max_open_requests,
        "max_open_requests",
        settings.max_open_requests_per_tenant,
        "max_open_requests_per_tenant",
    )
    return DoorShares(
        Shares(requests),
        Shares(body_bytes),
        Shares(uploads),
        TenantLanes(Shares(queries), at_once=1, total_at_once=queries_at_once),
        TenantLanes(Shares(messages), at_once=_MESSAGES_AT_ONCE, total_at_once=_MESSAGES_AT_ONCE * _LINES),
    )
