"""Relay planning, pure: who follows whom, by what the links have left, and when a running relay needs other sources."""

from torchrelay.scheduler.planning.arrows import MAX_ALTERNATES, MAX_STRIPED, Arrow
from torchrelay.scheduler.planning.nodes import PRESUMED_BYTES_PER_S, Arriving, Node, Uplink
from torchrelay.scheduler.planning.plan import plan
from torchrelay.scheduler.planning.running import Relays, RunningRelay, measured_bytes_per_s, whole_holders

__all__ = [
    "MAX_ALTERNATES",
    "MAX_STRIPED",
    "PRESUMED_BYTES_PER_S",
    "Arriving",
    "Arrow",
    "Node",
    "Relays",
    "RunningRelay",
    "Uplink",
    "measured_bytes_per_s",
    "plan",
    "whole_holders",
]
