"""Rate at which a queue with waiting requests frees places, measured between placements."""

from __future__ import annotations

from dataclasses import dataclass

_WINDOW_S = 10.0  # older measurements are halved, repeatedly
_MIN_PLACES = 16  # fewer placements are never halved
_LATE_S = 60.0  # after this time without a placement, an empty queue has no known rate


@dataclass(slots=True)
class PlaceRate:
    """Rate of placements, counted only while requests wait: an empty queue shows its clients' rate, not its
    instances'.
    """

    _num_freed: float = 0.0
    _during_s: float = 0.0
    _last_at: float = 0.0  # time of the last placement
    _began_at: float | None = None  # time of the first placement since the queue was empty

    def take(self, now: float, *, is_last: bool) -> None:
        """Counts a placement. ``is_last``: it leaves the queue empty."""
        if self._began_at is None:
            self._began_at = now
        elif now > self._began_at:  # placements at the first instant do not show a rate
            if now > self._last_at and self._during_s > _WINDOW_S and self._num_freed > _MIN_PLACES:
                self._during_s /= 2
                self._num_freed /= 2
            self._during_s += now - self._last_at
            self._num_freed += 1
        self._last_at = now
        if is_last:
            self._began_at = None

    def emptied(self) -> None:
        """Stops the measurement, because no request waits any more."""
        self._began_at = None

    def per_s(self, now: float) -> float | None:
        """Places per second of a non-empty queue; None if not measured recently."""
        if not self._num_freed or (self._began_at is None and now - self._last_at > _LATE_S):
            return None
        return self._num_freed / (self._during_s + (now - self._last_at if self._began_at is not None else 0.0))
