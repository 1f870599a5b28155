"""Relay planning, without side effects: which store follows which others, by the bandwidth left on their links."""

from torchrelay.scheduler.planning.edge import MAX_ALTERNATES, MAX_STRIPED, TransferEdge
from torchrelay.scheduler.planning.nodes import DEFAULT_BYTES_PER_S, REMOTE, Node, ReceiveProgress
from torchrelay.scheduler.planning.plan import plan

__all__ = [
    "DEFAULT_BYTES_PER_S",
    "MAX_ALTERNATES",
    "MAX_STRIPED",
    "REMOTE",
    "Node",
    "ReceiveProgress",
    "TransferEdge",
    "plan",
]
