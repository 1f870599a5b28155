"""Relay planning, without side effects: which store follows which others, by the bandwidth left on their links."""

from torchrelay.scheduler.policy.relay.planning.edge import MAX_ALTERNATES, MAX_STRIPED, TransferEdge
from torchrelay.scheduler.policy.relay.planning.nodes import DEFAULT_BYTES_PER_S, Node, ReceiveProgress
from torchrelay.scheduler.policy.relay.planning.plan import plan

__all__ = [
    "DEFAULT_BYTES_PER_S",
    "MAX_ALTERNATES",
    "MAX_STRIPED",
    "Node",
    "ReceiveProgress",
    "TransferEdge",
    "plan",
]
