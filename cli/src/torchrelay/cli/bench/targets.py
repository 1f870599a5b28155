"""Targets of latency: a pair of seconds, or a name of MLPerf's configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Targets:
    """Most seconds to the first token, and per further token (TPOT: without the first)."""

    name: str
    ttft_s: float
    tpot_s: float

    @property
    def label(self) -> str:
        """``MLPerf-like``: the targets alone do not make a submission."""
        return "your targets" if self.name == OWN else f"MLPerf-like {self.name}"


OWN: Final = "own"
# Milliseconds to the first token and per further token, of the scenarios server and interactive.
_MLPERF_MS: Final = {
    "llama3.1-8b-server": (2000, 100),
    "llama3.1-8b-interactive": (500, 30),
    "llama2-70b-server": (2000, 200),
    "llama2-70b-interactive": (450, 40),
    "llama3.1-405b-server": (6000, 175),
    "llama3.1-405b-interactive": (4500, 80),
    "deepseek-r1-server": (2000, 80),
    "deepseek-r1-interactive": (1500, 15),
}
MLPERF: Final = {name: Targets(name, ttft / 1000, tpot / 1000) for name, (ttft, tpot) in _MLPERF_MS.items()}


def read_targets(text: str) -> Targets:
    """The targets of a name, or of two numbers of seconds as in ``0.5,0.03``. Raises ``ValueError``."""
    if text in MLPERF:
        return MLPERF[text]
    try:
        ttft_s, tpot_s = map(float, text.split(","))
    except ValueError:
        raise ValueError(
            f"{text!r} is neither a pair of seconds, as 0.5,0.03, nor one of {', '.join(MLPERF)}"
        ) from None
    if not (0 < ttft_s < math.inf and 0 < tpot_s < math.inf):
        raise ValueError(f"{text!r}: both must be above 0: seconds to the first token, and per further token")
    return Targets(OWN, ttft_s, tpot_s)
