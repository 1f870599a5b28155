"""Whether the engine of this worker hangs, for its own health check. Pure.

More patient than the scheduler, which places requests elsewhere: what fails this check is killed.
"""

from __future__ import annotations

from torchrelay.common.liveness import EngineProgress, Liveness


class EngineWatch:
    """``observe`` at every look; looks may be any time apart."""

    def __init__(self, stall_s: float, now: float) -> None:
        self._stall_s = stall_s
        self._liveness = Liveness(now)

    def observe(self, progress: EngineProgress, now: float) -> None:
        self._liveness.observe(progress, now)

    def fault(self, now: float) -> str:
        """Why the worker cannot serve; empty if it can."""
        if not self._liveness.is_stalled(now, self._stall_s):
            return ""
        return f"the engine has work and has made no step for {now - self._liveness.advanced_at:.0f} s"
