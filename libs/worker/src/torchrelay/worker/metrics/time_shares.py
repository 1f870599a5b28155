"""Shares of recent engine time by activity, and the bottleneck that they show."""

from __future__ import annotations

from dataclasses import dataclass

from torchrelay.engine.core import StepProfile

_HALF_LIFE_S = 2.0  # of time in steps
_BOTTLENECK_SHARE = 0.3  # without that activity, steps would be 1.4 times as fast


@dataclass(frozen=True, slots=True)
class TimeShares:
    """Shares of the time in steps. They add up to 1; all are 0 before the first step."""

    compute: float = 0.0
    memory: float = 0.0  # decode steps that are bound by it, and copies for a computation
    kv_transfer: float = 0.0
    io_wait: float = 0.0
    scheduling: float = 0.0

    def after(self, profile: StepProfile) -> TimeShares:
        """The shares after one more step; a step's weight halves with every two seconds of time in steps."""
        if not profile.total_s:
            return self
        kept = 0.0 if self == NO_SHARES else 0.5 ** (profile.total_s / _HALF_LIFE_S)
        parts = {name: seconds / profile.total_s for name, seconds in seconds_of(profile).items()}
        return TimeShares(*(getattr(self, name) * kept + part * (1 - kept) for name, part in parts.items()))


NO_SHARES = TimeShares()


def seconds_of(profile: StepProfile) -> dict[str, float]:
    """Seconds by activity, in the order of ``TimeShares``."""
    return {
        "compute": profile.compute_s,
        "memory": profile.memory_s,
        "kv_transfer": profile.kv_transfer_s,
        "io_wait": profile.io_wait_s,
        "scheduling": profile.scheduling_s,
    }


def bottleneck(shares: TimeShares) -> str:
    """The largest activity beside the model's own computation if it takes 30% of the time or more, else what bounds
    that computation: "compute" or "memory". Empty before the first step.
    """
    if shares == NO_SHARES:
        return ""
    overheads = {name: getattr(shares, name) for name in ("kv_transfer", "io_wait", "scheduling")}
    largest = max(overheads, key=overheads.__getitem__)
    if overheads[largest] >= _BOTTLENECK_SHARE:
        return largest
    return "memory" if shares.memory > shares.compute else "compute"
