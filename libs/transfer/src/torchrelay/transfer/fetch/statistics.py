"""What each source of a transfer has brought, kept while it runs; read by whoever reports of it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from torchrelay.transfer.fetch.rates import DecayingRate


@dataclass(frozen=True, slots=True)
class SourceStats:
    """One source's part. ``bytes_per_s`` is measured of late; ``error``: why it was given up last, if it was."""

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
    """Methods may be called on any thread."""

    def __init__(self) -> None:
        self._entries: dict[str, _SourceCounts] = {}
        self._num_repairs = 0
        self._lock = threading.Lock()

    def joined(self, holder_id: str) -> None:
        """It is asked for chunks from now on."""
        with self._lock:
            self._entry(holder_id).num_followed += 1

    def left(self, holder_id: str) -> None:
        """It no longer is."""
        with self._lock:
            self._entry(holder_id).num_followed -= 1

    def failed(self, holder_id: str, error: str) -> None:
        """Why it was given up."""
        with self._lock:
            self._entry(holder_id).error = error

    def received(self, holder_id: str, num_bytes: int) -> None:
        """A verified chunk."""
        now = time.monotonic()
        with self._lock:
            entry = self._entry(holder_id)
            entry.num_bytes += num_bytes
            entry.rate.add(num_bytes, now)

    def repaired(self, times: int = 1) -> None:
        """Sources were given up, or joined because others were in doubt."""
        with self._lock:
            self._num_repairs += times

    @property
    def num_repairs(self) -> int:
        return self._num_repairs

    @property
    def largest(self) -> str:
        """The source that has brought most; of those that have brought nothing, the one that is followed."""
        with self._lock:
            entries = self._entries.items()
            return max(entries, key=lambda item: (item[1].num_bytes, item[1].num_followed), default=("", None))[0]

    def by_source(self) -> list[SourceStats]:
        """Every source that was followed, in the order in which they were first."""
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

    def _entry(self, holder_id: str) -> _SourceCounts:
        if holder_id not in self._entries:
            self._entries[holder_id] = _SourceCounts(DecayingRate(time.monotonic()))
        return self._entries[holder_id]
