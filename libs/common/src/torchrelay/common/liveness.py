"""Whether a peer is alive, judged by what it says: a process that hangs is as dead as one that ended. Pure.

Whoever waits for a peer asks it for beats. A peer is lost when it is silent, or when its engine has work and does not
advance for longer than what it does now should take. Times are seconds of any clock that never goes back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BEAT_S: Final = 0.5  # between two beats
SILENT_S: Final = 3.0  # without a message, or without an advance beyond what is expected: the peer is lost


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """Where a worker's engine is; see the message of the same name in ``types.proto``."""

    num_advances: int = 0
    has_work: bool = False
    expected_s: float = 0.0


NO_ENGINE: Final = EngineProgress()


@dataclass(slots=True)
class Liveness:
    """What a watcher has heard of one peer."""

    heard_at: float
    advanced_at: float = 0.0  # the engine had advanced, or had no work until then
    progress: EngineProgress = NO_ENGINE

    def __post_init__(self) -> None:
        self.listening_since(self.heard_at)

    def listening_since(self, begin: float) -> None:
        """Nobody listened before: silence counts from then at the earliest."""
        self.heard_at, self.advanced_at = max(self.heard_at, begin), max(self.advanced_at, begin)

    def heard(self, now: float) -> None:
        """The peer sent anything at all."""
        self.heard_at = now

    def observe(self, progress: EngineProgress, now: float) -> None:
        """The peer said where its engine is."""
        self.heard_at = now
        was_at_work = self.progress.has_work and progress.has_work  # at rest nothing was expected of it, however long
        if not was_at_work or progress.num_advances != self.progress.num_advances:
            self.advanced_at = now
        self.progress = progress

    def is_silent(self, now: float, silent_s: float = SILENT_S) -> bool:
        return now - self.heard_at > silent_s

    def is_stalled(self, now: float, silent_s: float = SILENT_S) -> bool:
        """Whether the engine has work and has not advanced for too long."""
        return self.progress.has_work and now - self.advanced_at > silent_s + self.progress.expected_s

    def fault(self, now: float, silent_s: float = SILENT_S) -> str:
        """Why the peer is lost, to follow its name; empty: it is alive."""
        if self.is_silent(now, silent_s):
            return f"was silent for {silent_s:g} s"
        if self.is_stalled(now, silent_s):
            return f"had work and made no step for {now - self.advanced_at:.1f} s"
        return ""
