"""Relay planning, pure: who follows whom, by what the links have left, and when a running relay needs other sources."""

from torchrelay.scheduler.planning.edge import MAX_ALTERNATES, MAX_STRIPED, TransferEdge
from torchrelay.scheduler.planning.nodes import DEFAULT_BYTES_PER_S, Node, ReceiveProgress, Uplink
from torchrelay.scheduler.planning.plan import plan
from torchrelay.scheduler.policy.relay.running_relays import (
    RunningRelay,
    RunningRelays,
    measured_bytes_per_s,
    whole_holders,
)

__all__ = [
    "DEFAULT_BYTES_PER_S",
    "MAX_ALTERNATES",
    "MAX_STRIPED",
    "Node",
    "ReceiveProgress",
    "RunningRelay",
    "RunningRelays",
    "TransferEdge",
    "Uplink",
    "measured_bytes_per_s",
    "plan",
    "whole_holders",
]
