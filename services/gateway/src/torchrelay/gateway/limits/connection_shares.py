"""The shares of tenants in the resources of the gateway's REST and gRPC servers."""

from __future__ import annotations

from dataclasses import dataclass

from torchrelay.gateway.limits.shares import ShareLimits, Shares
from torchrelay.gateway.limits.tenant_turns import TenantTurns
from torchrelay.gateway.settings import GatewaySettings

_LINES = 32  # tenants that can have a full line of queries at once
# gRPC messages that arrive at once, each of up to 1 MiB. A tenant has a place for each call that HAProxy allows on a
# connection: there a call that waits for its place would block the others.
_MESSAGES, _MESSAGES_PER_TENANT = 256, 100


@dataclass(frozen=True, slots=True)
class ConnectionShares:
    requests: Shares  # from the check of the key to the last byte of the answer
    body_bytes: Shares  # of bodies in memory, until their prompts are encoded
    answer_bytes: Shares  # of logprobs, vectors and repeated prompts in memory, until they are sent
    uploads: Shares  # files that are being sent, and commits
    queries: TenantTurns  # sums over tables, and searches in them
    lists: TenantTurns  # of what an index answers, so that they do not wait for long queries
    explanations: TenantTurns  # that the scheduler answers
    messages: TenantTurns  # of gRPC calls with a single message, while they arrive
    streams: Shares  # gRPC calls with several messages


def connection_shares(settings: GatewaySettings, queries_at_once: int = 1) -> ConnectionShares:
    """``queries_at_once``: connections that the database's pool can spare for queries."""
    return ConnectionShares(
        _shares(settings, "open requests", "max_open_requests"),
        _shares(settings, "bytes of request bodies in memory", "max_buffered_body_bytes"),
        _shares(settings, "bytes of answers in memory", "max_held_answer_bytes"),
        _shares(settings, "uploads of files under way", "max_uploads"),
        _line(settings, "queries under way", queries_at_once),
        _line(settings, "lists under way", queries_at_once),
        _line(settings, "explanations under way", _LINES),
        # Each message belongs to a request, whose share is held.
        TenantTurns(at_once=_MESSAGES_PER_TENANT, total_at_once=_MESSAGES),
        _shares(settings, "open gRPC streams", "max_open_streams"),
    )


def _line(settings: GatewaySettings, noun: str, total_at_once: int) -> TenantTurns:
    """Lets a single operation of a tenant run at once, and a bounded number of them wait."""
    most, setting = settings.max_queries_per_tenant, "max_queries_per_tenant"
    limits = ShareLimits(noun, most * _LINES, f"{setting}, times {_LINES}", most, setting)
    return TenantTurns(at_once=1, total_at_once=total_at_once, shares=Shares(limits))


def _shares(settings: GatewaySettings, noun: str, setting: str) -> Shares:
    """Shares with the limits of ``setting``, and of the setting of the same name for each tenant."""
    of_tenant = f"{setting}_per_tenant"
    return Shares(ShareLimits(noun, getattr(settings, setting), setting, getattr(settings, of_tenant), of_tenant))
