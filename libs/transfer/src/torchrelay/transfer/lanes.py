"""What a transfer knows of one of its sources. Chunks are known here by their place in the order wanted."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from torchrelay.transfer.rates import Gauge

OPENING_S = 0.3  # a source that has not opened in this time is doubted
SILENCE_S = 0.15  # so is one that could send and does not
SILENCE_CHUNKS = 4  # ... for so many times what a chunk takes
LONGEST_SILENCE_S = 1.0


class Phase(enum.Enum):
    """WAITING -> OPENING -> OPEN; back to WAITING after a failure, or to GONE after too many."""

    WAITING = "waiting"
    OPENING = "opening"
    OPEN = "open"
    GONE = "gone"


@dataclass(slots=True)
class Lane:
    """One source. Times are the caller's clock, in seconds."""

    phase: Phase = Phase.WAITING
    strikes: int = 0  # failures with no chunk between them
    resting: bool = False  # open, and not asked: enough others bring chunks
    has: bytearray = field(default_factory=bytearray)  # one byte for each place
    outstanding: dict[int, None] = field(default_factory=dict)  # asked for and not yet come, in the order asked
    cancels: list[int] = field(default_factory=list)  # to be told to the source
    begun: int | None = None  # the chunk that is coming in
    revoked: bool = False  # what is coming in is to be let go: another brings it
    gauge: Gauge = field(default_factory=Gauge)
    since: float = 0.0  # opening, then open
    heard_at: float = 0.0
    brought_at: float = 0.0
    noted_at: float = 0.0
    busy: bool = False  # could send since ``noted_at``
    silent: bool = False
    starved: bool = False
    slow: bool = False
    sound_since: float = 0.0  # not in doubt since then
    settled_s: float = 0.0  # how long it has to be sound before others rest; 0: it never was slow

    @property
    def active(self) -> bool:
        return self.phase in (Phase.OPENING, Phase.OPEN) and not self.resting

    @property
    def asks(self) -> bool:
        """Whether it may be asked for more."""
        return self.phase is Phase.OPEN and not self.resting and not self.silent

    @property
    def owes(self) -> bool:
        return self.begun is not None or bool(self.outstanding)

    @property
    def could_send(self) -> bool:
        """It has something that it was asked for."""
        return self.begun is not None or any(self.has[place] for place in self.outstanding)

    def in_doubt(self, now: float) -> bool:
        if self.phase is Phase.OPENING:
            return now - self.since > OPENING_S
        return self.silent or self.starved or self.slow

    def open(self, num_places: int, now: float) -> None:
        self.phase, self.has = Phase.OPEN, bytearray(num_places)
        self.since = self.heard_at = self.brought_at = self.noted_at = self.sound_since = now

    def note(self, num_bytes: int, now: float, *, sharing: bool) -> None:
        """Something has happened: the time since the last such moment is accounted for."""
        self.gauge.note(num_bytes, now - self.noted_at, busy=self.busy, sharing=sharing)
        self.noted_at = now
        if num_bytes:
            self.brought_at = self.heard_at = now

    def turn(self, now: float) -> None:
        """What it owes or has changed: can it send now?"""
        could_send = self.could_send
        if could_send and not self.busy:
            self.brought_at = now  # the time before does not count
        self.busy = could_send

    def is_silent(self, chunk_bytes: float, now: float) -> bool:
        """It could send, and nothing comes; or not even a sign of life does."""
        if not self.owes:
            return False
        chunk_s = chunk_bytes / self.gauge.recent if self.gauge.recent else 0.0
        patience_s = min(max(SILENCE_S, SILENCE_CHUNKS * chunk_s), LONGEST_SILENCE_S)
        return now - (self.brought_at if self.busy else self.heard_at) > patience_s

    def eta_s(self, chunk_bytes: float, num_more: int, fallback_rate: float) -> float:
        """When what it owes, and ``num_more`` chunks, will have come."""
        rate = self.gauge.recent or fallback_rate
        num_chunks = len(self.outstanding) + num_more
        return num_chunks * chunk_bytes / rate if rate else 0.0

    def close(self) -> None:
        """The connection is gone, and all that belonged to it."""
        self.outstanding.clear()
        self.cancels.clear()
        self.begun = None
        self.gauge = Gauge()
        self.revoked = self.busy = self.silent = self.starved = self.slow = self.resting = False
