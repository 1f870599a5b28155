"""What a transfer knows of one of its sources. Chunks are known here by their place in the order wanted."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from torchrelay.transfer.fetch.rates import RateMonitor

OPEN_TIMEOUT_S = 0.3  # a source that has not opened in this time is doubted
MIN_SILENCE_S = 0.15  # so is one that could send and does not
SILENCE_CHUNKS = 4  # ... for so many times what a chunk takes
MAX_SILENCE_S = 1.0


class SourcePhase(enum.Enum):
    """WAITING -> OPENING -> OPEN; back to WAITING after a failure, or to GONE after too many."""

    WAITING = "waiting"
    OPENING = "opening"
    OPEN = "open"
    GONE = "gone"


@dataclass(slots=True)
class SourceState:
    """One source. Times are the caller's clock, in seconds."""

    phase: SourcePhase = SourcePhase.WAITING
    num_failures: int = 0  # failures with no chunk between them
    standby: bool = False  # open, and not asked: enough others bring chunks
    has: bytearray = field(default_factory=bytearray)  # one byte for each place
    outstanding: dict[int, None] = field(default_factory=dict)  # asked for and not yet come, in the order asked
    cancels: list[int] = field(default_factory=list)  # to be told to the source
    receiving: int | None = None  # the chunk that is coming in
    revoked: bool = False  # what is coming in is to be let go: another brings it
    monitor: RateMonitor = field(default_factory=RateMonitor)
    since: float = 0.0  # opening, then open
    last_frame_at: float = 0.0
    last_bytes_at: float = 0.0
    accounted_at: float = 0.0
    busy: bool = False  # could send since ``noted_at``
    silent: bool = False
    starved: bool = False
    slow: bool = False
    healthy_since: float = 0.0  # not in doubt since then
    probation_s: float = 0.0  # how long it has to be sound before others rest; 0: it never was slow

    @property
    def active(self) -> bool:
        return self.phase in (SourcePhase.OPENING, SourcePhase.OPEN) and not self.standby

    @property
    def accepts_requests(self) -> bool:
        """Whether it may be asked for more."""
        return self.phase is SourcePhase.OPEN and not self.standby and not self.silent

    @property
    def has_outstanding(self) -> bool:
        return self.receiving is not None or bool(self.outstanding)

    @property
    def could_send(self) -> bool:
        """It has something that it was asked for."""
        return self.receiving is not None or any(self.has[place] for place in self.outstanding)

    def is_suspect(self, now: float) -> bool:
        if self.phase is SourcePhase.OPENING:
            return now - self.since > OPEN_TIMEOUT_S
        return self.silent or self.starved or self.slow

    def open(self, num_places: int, now: float) -> None:
        self.phase, self.has = SourcePhase.OPEN, bytearray(num_places)
        self.since = self.last_frame_at = self.last_bytes_at = self.accounted_at = self.healthy_since = now

    def record(self, num_bytes: int, now: float, *, sharing: bool) -> None:
        """Something has happened: the time since the last such moment is accounted for."""
        self.monitor.record(num_bytes, now - self.accounted_at, busy=self.busy, sharing=sharing)
        self.accounted_at = now
        if num_bytes:
            self.last_bytes_at = self.last_frame_at = now

    def update_busy(self, now: float) -> None:
        """What it owes or has changed: can it send now?"""
        could_send = self.could_send
        if could_send and not self.busy:
            self.last_bytes_at = now  # the time before does not count
        self.busy = could_send

    def is_silent(self, chunk_bytes: float, now: float) -> bool:
        """It could send, and nothing comes; or not even a sign of life does."""
        if not self.has_outstanding:
            return False
        chunk_s = chunk_bytes / self.monitor.recent if self.monitor.recent else 0.0
        patience_s = min(max(MIN_SILENCE_S, SILENCE_CHUNKS * chunk_s), MAX_SILENCE_S)
        return now - (self.last_bytes_at if self.busy else self.last_frame_at) > patience_s

    def eta_s(self, chunk_bytes: float, num_more: int, fallback_rate: float) -> float:
        """When what it owes, and ``num_more`` chunks, will have come."""
        rate = self.monitor.recent or fallback_rate
        num_chunks = len(self.outstanding) + num_more
        return num_chunks * chunk_bytes / rate if rate else 0.0

    def close(self) -> None:
        """The connection is gone, and all that belonged to it."""
        self.outstanding.clear()
        self.cancels.clear()
        self.receiving = None
        self.monitor = RateMonitor()
        self.revoked = self.busy = self.silent = self.starved = self.slow = self.standby = False
