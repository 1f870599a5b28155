"""The planner's view of hosts. Rates are bytes per second."""

from __future__ import annotations

import math
from dataclasses import dataclass

DEFAULT_BYTES_PER_S = 5e8  # for a direction without measurements
MIN_BYTES_PER_S = 1.0  # for a full direction, which a new relay still shares


@dataclass(frozen=True, slots=True)
class Node:
    """A store's link. A residual is the rate left for a new relay in a direction: capacity less KV streams, other
    background traffic and the running relays that do not yield to it.
    """

    residual_out: float = DEFAULT_BYTES_PER_S
    residual_in: float = DEFAULT_BYTES_PER_S
    host: str = ""  # stores of one host share its network copy; empty: alone on its host
    busy_out: bool = False  # it sends KV or other relays' chunks; used only if no free node suffices
    leaf: str = ""  # the switch of the host; hosts of one leaf reach each other without its uplink

    @property
    def out(self) -> float:
        return max(self.residual_out, MIN_BYTES_PER_S)

    @property
    def into(self) -> float:
        return max(self.residual_in, MIN_BYTES_PER_S)


@dataclass(frozen=True, slots=True)
class ReceiveProgress:
    """Progress of an incoming copy."""

    have: float = 0.0  # part of the pack, 0 to 1
    bytes_per_s: float = DEFAULT_BYTES_PER_S

    @property
    def serves_bytes_per_s(self) -> float:
        """The rate of a follower that begins now and gets the whole pack by the time this copy is complete."""
        missing = 1.0 - self.have
        return max(self.bytes_per_s, MIN_BYTES_PER_S) / missing if missing > 0 else math.inf
