"""The rate at which bytes are read: a leaky bucket. Pure: the time is an argument."""

from __future__ import annotations


class Pace:
    """Allows ``burst_bytes`` at once, and ``bytes_per_s`` in the long run."""

    def __init__(self, bytes_per_s: float, burst_bytes: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._burst_s = burst_bytes / bytes_per_s
        self._until_s = 0.0  # when all bytes read so far would have arrived at the rate

    def after(self, num_bytes: int, now_s: float) -> float:
        """Counts ``num_bytes`` read; returns the seconds until more may be read, at most 0 while the burst lasts."""
        self._until_s = max(self._until_s, now_s) + num_bytes / self._bytes_per_s
        return self._until_s - self._burst_s - now_s
