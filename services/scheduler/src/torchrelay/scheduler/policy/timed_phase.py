"""Phases of a request or load, as measured by gateways, workers and stores."""

from __future__ import annotations

import msgspec


class TimedPhase(msgspec.Struct, frozen=True, gc=False):
    """A named phase, in Unix microseconds of the clock that measured it."""

    name: str
    begin_us: int
    end_us: int
    where: str = ""
    detail: str = ""

    @property
    def duration_s(self) -> float:
        """Duration; never negative, even if the clock was set back."""
        return max(self.end_us - self.begin_us, 0) / 1e6
