"""Times that gateways, workers and stores have measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TimedPhase:
    """A named stretch of time somebody measured, in Unix microseconds."""

    name: str
    begin_us: int
    end_us: int
    where: str = ""
    detail: str = ""

    @property
    def duration_s(self) -> float:
        """Never below zero, whatever the clocks say."""
        return max(self.end_us - self.begin_us, 0) / 1e6
