"""Whether a peer is alive, judged by its messages: a process that hangs counts as lost. Pure.

A watcher asks its peer for beats. A peer is lost when it is silent, or when its engine has work and does not
advance for longer than its current work should take. Times are seconds of any clock that never goes back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BEAT_S: Final = 0.5  # between two beats
SILENT_S: Final = 3.0  # without a message, or without an advance beyond what is expected: the peer is lost


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """The progress of a worker's engine; see the message of the same name in ``types.proto``."""

    num_advances: int = 0
    has_work: bool = False
    expected_s: float = 0.0


NO_ENGINE: Final = EngineProgress()


@dataclass(slots=True)
class Liveness:
    """The last message and the last progress of a peer."""

    last_message_at: float
    advanced_at: float = 0.0  # the engine had advanced, or had no work until then
    progress: EngineProgress = NO_ENGINE

    def __post_init__(self) -> None:
        self.listening_since(self.last_message_at)

    def listening_since(self, begin: float) -> None:
        """Counts silence from ``begin`` at the earliest, as nobody listened before."""
        self.last_message_at, self.advanced_at = max(self.last_message_at, begin), max(self.advanced_at, begin)

    def record_message(self, now: float) -> None:
        """Records a message of any kind."""
        self.last_message_at = now

    def observe(self, progress: EngineProgress, now: float) -> None:
        """Records a message with the engine's progress."""
        self.last_message_at = now
        was_at_work = self.progress.has_work and progress.has_work  # at rest nothing was expected of it, however long
        if not was_at_work or progress.num_advances != self.progress.num_advances:
            self.advanced_at = now
        self.progress = progress

    def is_silent(self, now: float, silent_s: float = SILENT_S) -> bool:
        return now - self.last_message_at > silent_s

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
