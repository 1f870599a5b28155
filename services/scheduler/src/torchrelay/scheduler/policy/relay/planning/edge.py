"""The edges of a plan: which store gets the pack from which others."""

from __future__ import annotations

from dataclasses import dataclass

from torchrelay.common.quantities import format_duration

MAX_STRIPED = 4  # sources followed at once
MAX_ALTERNATES = 4  # besides the striped sources and the remote store


@dataclass(frozen=True)
class TransferEdge:
    """A store's incoming copy. The first ``num_striped`` of ``sources`` are followed at once, each at the rate that it
    achieves; the others are for repair, best first, the remote store last.

    ``shares``: the planned share of the pack from each striped source; they add up to 1. ``bytes_per_s`` and
    ``ready_s`` (from the start of the plan) are predictions; 0 without a prediction.
    """

    target: str
    sources: tuple[str, ...]
    already_there: bool = False  # the copy is present or on its way, and nothing new is transferred
    num_striped: int = 1
    shares: tuple[float, ...] = (1.0,)
    bytes_per_s: float = 0.0
    ready_s: float = 0.0
    whole: bool = False  # already there and complete

    @property
    def upstream(self) -> str:
        return self.sources[0]

    @property
    def striped(self) -> tuple[str, ...]:
        return self.sources[: self.num_striped]

    def __str__(self) -> str:
        """Text such as ``s3 from s1 60 % and s2 40 % at 480 MB/s, ready in 900 ms``."""
        if self.whole:
            return f"{self.target} from its host copy"
        if self.already_there:
            return f"{self.target} by a relay under way already"
        parts = zip(self.striped, self.shares, strict=True)
        origin = " and ".join(f"{source} {share * 100:.0f} %" for source, share in parts)
        text = f"{self.target} from {self.upstream if len(self.striped) == 1 else origin}"
        speed = f" at {self.bytes_per_s / 1e6:.3g} MB/s, ready in {format_duration(self.ready_s)}"
        return text + speed if self.ready_s else text
