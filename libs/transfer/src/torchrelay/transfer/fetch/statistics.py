"""The bytes that each source of a running transfer has delivered, for progress reports."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass

from torchrelay.transfer.fetch.rates import DecayingRate


@dataclass(frozen=True, slots=True)
class SourceStats:
    """A source's share. ``bytes_per_s`` is the recent rate; ``error`` the reason of its last failure, if any."""

    holder_id: str
    num_bytes: int
    bytes_per_s: float
    following: bool
    error: str


@dataclass(slots=True)
class _SourceCounts:
    rate: DecayingRate
    num_bytes: int = 0
    num_followed: int = 0
    error: str = ""


class TransferStats:
    """Statistics of a transfer by source. Thread-safe."""

    def __init__(self) -> None:
        self._entries = defaultdict[str, _SourceCounts](lambda: _SourceCounts(DecayingRate(time.monotonic())))
        self.num_repairs = 0  # sources given up, or joined because another was suspect
        self.num_damaged_chunks = 0  # received chunks that did not match their digests
        self._lock = threading.Lock()

    def joined(self, holder_id: str) -> None:
        """Records that the source is followed."""
        with self._lock:
            self._entries[holder_id].num_followed += 1

    def left(self, holder_id: str) -> None:
        """Records that the source is no longer followed."""
        with self._lock:
            self._entries[holder_id].num_followed -= 1

    def failed(self, holder_id: str, error: str) -> None:
        with self._lock:
            self._entries[holder_id].error = error

    def received(self, holder_id: str, num_bytes: int) -> None:
        """Counts a verified chunk."""
        now = time.monotonic()
        with self._lock:
            entry = self._entries[holder_id]
            entry.num_bytes += num_bytes
            entry.rate.add(num_bytes, now)

    def repaired(self, times: int = 1) -> None:
        with self._lock:
            self.num_repairs += times

    def damaged(self) -> None:
        with self._lock:
            self.num_damaged_chunks += 1

    @property
    def largest(self) -> str:
        """The source that delivered most; before any delivery, a followed source."""
        with self._lock:
            entries = self._entries.items()
            return max(entries, key=lambda item: (item[1].num_bytes, item[1].num_followed), default=("", None))[0]

    def by_source(self) -> list[SourceStats]:
        """All sources, in the order in which they first joined."""
        now = time.monotonic()
        with self._lock:
            return [
                SourceStats(
                    holder_id,
                    entry.num_bytes,
                    entry.rate.bytes_per_s(now) if entry.num_followed else 0.0,
                    entry.num_followed > 0,
                    entry.error,
                )
                for holder_id, entry in self._entries.items()
            ]
