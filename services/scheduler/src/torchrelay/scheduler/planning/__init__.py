"""Relay planning, pure: which store follows which others, by what their links have left."""

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
