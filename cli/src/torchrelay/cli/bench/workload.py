"""The load that a person asks for: its scenario, its size and its requests."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from torchrelay.common.quantities import format_count


class Scenario(StrEnum):
    """When requests are sent; the first four as in MLPerf Inference."""

    SINGLE = "single"  # one after another
    SERVER = "server"  # at random times (Poisson), whatever the platform does
    OFFLINE = "offline"  # all at once
    MULTI = "multi"  # several at once, the next ones when all of them have ended
    BURST = "burst"  # nothing, then several at once, again and again
    TRACE = "trace"  # at the times of recorded arrivals
    COLD = "cold"  # each at a random time after the model has reached zero


SECONDS: Final = 60.0
_NUM_OFFLINE, _NUM_COLD = 100, 5


@dataclass(frozen=True, slots=True)
class Workload:
    """``seconds``, ``num_requests``: the load ends with the first of both; None: no bound."""

    scenario: Scenario
    seconds: float | None
    num_requests: int | None
    num_prompt: int
    num_answer: int
    rate: float = 4.0
    at_once: int = 8
    every_s: float = 10.0  # of the scenario burst
    wait_s: float = 5.0  # of the scenario cold, at most
    trace: Path | None = None
    num_shared: int = 0  # tokens that all prompts begin with
    seed: int = 1

    @property
    def words(self) -> str:
        """The load in a line."""
        bounds = [] if self.num_requests is None else [format_count(self.num_requests, "request")]
        bounds += [] if self.seconds is None else [f"{self.seconds:g} s"]
        lengths = (
            "lengths of the trace"
            if self.trace
            else f"prompts of {self.num_prompt:,}, answers of {self.num_answer:,} tokens"
        )
        shared = f" ({self.num_shared:,} shared)" if self.num_shared else ""
        return f"{self.scenario}: {self._rhythm()}, {' or '.join(bounds)}; {lengths}{shared}"

    def _rhythm(self) -> str:
        match self.scenario:
            case Scenario.SINGLE:
                return "one after another"
            case Scenario.SERVER:
                return f"Poisson arrivals, {self.rate:g} per second"
            case Scenario.OFFLINE:
                return "all at once"
            case Scenario.MULTI:
                return f"{self.at_once} at once"
            case Scenario.BURST:
                return f"{self.at_once} at once every {self.every_s:g} s"
            case Scenario.TRACE:
                return str(self.trace.name if self.trace else "")
            case Scenario.COLD:
                return f"each at zero and after up to {self.wait_s:g} s more"


def bounds_of(scenario: Scenario, seconds: float | None, num_requests: int | None) -> tuple[float | None, int | None]:
    """The bounds of a load for which a person gave these, or none."""
    if seconds is not None or num_requests is not None:
        return seconds, num_requests
    match scenario:
        case Scenario.OFFLINE:
            return None, _NUM_OFFLINE
        case Scenario.COLD:
            return None, _NUM_COLD
        case _:
            return SECONDS, None
