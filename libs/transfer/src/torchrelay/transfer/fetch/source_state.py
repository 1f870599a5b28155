"""The state of a source within a transfer. Chunks are identified by their position in the order wanted."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from torchrelay.transfer.fetch.rates import RateMonitor

OPEN_TIMEOUT_S = 0.3  # a source that takes longer to open is suspect
MIN_SILENCE_S = 0.15  # a source that could send and sends nothing for this long is suspect,
SILENCE_CHUNKS = 4  # or for this many times what a chunk takes, if that is longer
MAX_SILENCE_S = 1.0


class SourcePhase(enum.Enum):
    """WAITING -> OPENING -> OPEN; back to WAITING after a failure, or to GONE after too many."""

    WAITING = "waiting"
    OPENING = "opening"
    OPEN = "open"
    GONE = "gone"


@dataclass(slots=True)
class SourceState:
    """The state of a source. Times are the caller's clock, in seconds."""

    phase: SourcePhase = SourcePhase.WAITING
    num_failures: int = 0  # failures without a chunk in between
    standby: bool = False  # open, but not asked: enough other sources deliver
    has: bytearray = field(default_factory=bytearray)  # one byte per chunk: 1 if the source has it
    outstanding: dict[int, None] = field(default_factory=dict)  # requested and not yet arriving, in the order requested
    cancels: list[int] = field(default_factory=list)  # cancellations to send
    receiving: int | None = None  # the chunk that is arriving
    revoked: bool = False  # the arriving chunk is to be abandoned: another source delivers it
    monitor: RateMonitor = field(default_factory=RateMonitor)
    since: float = 0.0  # when it began to open, then when it was open
    last_frame_at: float = 0.0
    last_bytes_at: float = 0.0
    accounted_at: float = 0.0
    busy: bool = False  # could send since ``accounted_at``
    silent: bool = False
    starved: bool = False
    slow: bool = False
    healthy_since: float = 0.0  # end of the last suspicion
    probation_s: float = 0.0  # how long it must be healthy before alternates go on standby; 0: it was never slow

    @property
    def active(self) -> bool:
        return self.phase in (SourcePhase.OPENING, SourcePhase.OPEN) and not self.standby

    @property
    def accepts_requests(self) -> bool:
        return self.phase is SourcePhase.OPEN and not self.standby and not self.silent

    @property
    def has_outstanding(self) -> bool:
        return self.receiving is not None or bool(self.outstanding)

    def is_suspect(self, now: float) -> bool:
        if self.phase is SourcePhase.OPENING:
            return now - self.since > OPEN_TIMEOUT_S
        return self.silent or self.starved or self.slow

    def open(self, num_chunks: int, now: float) -> None:
        self.phase, self.has = SourcePhase.OPEN, bytearray(num_chunks)
        self.since = self.last_frame_at = self.last_bytes_at = self.accounted_at = self.healthy_since = now

    def record(self, num_bytes: int, now: float, *, sharing: bool) -> None:
        """Accounts for the time since the last call, and for the bytes received in it."""
        self.monitor.record(num_bytes, now - self.accounted_at, busy=self.busy, sharing=sharing)
        self.accounted_at = now
        if num_bytes:
            self.last_bytes_at = self.last_frame_at = now

    def update_busy(self, now: float) -> None:
        """Updates ``busy``; call it after each change of ``has``, ``outstanding`` or ``receiving``."""
        could_send = self.receiving is not None or any(self.has[position] for position in self.outstanding)
        if could_send and not self.busy:
            self.last_bytes_at = now  # the time before does not count
        self.busy = could_send

    def is_silent(self, chunk_bytes: float, now: float) -> bool:
        """Whether it could send and nothing arrives, or it has nothing to send and sends no keep-alive either."""
        if not self.has_outstanding:
            return False
        chunk_s = chunk_bytes / self.monitor.recent if self.monitor.recent else 0.0
        limit_s = min(max(MIN_SILENCE_S, SILENCE_CHUNKS * chunk_s), MAX_SILENCE_S)
        return now - (self.last_bytes_at if self.busy else self.last_frame_at) > limit_s

    def eta_s(self, chunk_bytes: float, num_more: int, fallback_rate: float) -> float:
        """Seconds that it needs for its outstanding chunks and ``num_more`` others."""
        rate = self.monitor.recent or fallback_rate
        num_chunks = len(self.outstanding) + num_more
        return num_chunks * chunk_bytes / rate if rate else 0.0

    def close(self) -> None:
        """Clears all state of the connection."""
        self.outstanding.clear()
        self.cancels.clear()
        self.receiving = None
        self.monitor = RateMonitor()
        self.revoked = self.busy = self.silent = self.starved = self.slow = self.standby = False
