"""What the planner knows of hosts and of the switches between them. Rates are bytes per second."""

from __future__ import annotations

import math
from dataclasses import dataclass

DEFAULT_BYTES_PER_S = 5e8  # of a direction nothing is known of
MIN_BYTES_PER_S = 1.0  # a direction that is full still moves: it is shared with whoever fills it


@dataclass(frozen=True, slots=True)
class Node:
    """What a store's links have left for a new relay, in either direction: capacity less KV streams, other background
    and the relays that run.
    """

    residual_out: float = DEFAULT_BYTES_PER_S
    residual_in: float = DEFAULT_BYTES_PER_S
    host: str = ""  # stores of one host share its network copy; empty: alone on its host
    busy_out: bool = False  # it sends KV or other relays' chunks; taken where no free one will do
    leaf: str = ""  # the switch the host hangs on; those of one leaf reach each other without its uplink

    @property
    def out(self) -> float:
        return max(self.residual_out, MIN_BYTES_PER_S)

    @property
    def into(self) -> float:
        return max(self.residual_in, MIN_BYTES_PER_S)


@dataclass(frozen=True, slots=True)
class Uplink:
    """What the link between a leaf and the rest of the network has left."""

    residual_up: float = math.inf  # away from the leaf
    residual_down: float = math.inf


@dataclass(frozen=True, slots=True)
class ReceiveProgress:
    """How far a copy is that is still being received."""

    have: float = 0.0  # part of the pack that is there, 0 to 1
    bytes_per_s: float = DEFAULT_BYTES_PER_S

    @property
    def serves_bytes_per_s(self) -> float:
        """The rate at which a follower that begins now gets the whole pack when it ends together with this copy."""
        missing = 1.0 - self.have
        return max(self.bytes_per_s, MIN_BYTES_PER_S) / missing if missing > 0 else math.inf
