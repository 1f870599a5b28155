"""How often a process reports: ten times a second while something goes on in it, else twice.

A platform that nobody calls should cost next to nothing.
"""

from __future__ import annotations

from typing import Final

LOOK_EVERY_S: Final = 0.1
STILL_S: Final = 0.5


class Cadence:
    """Of one process, which looks every ``LOOK_EVERY_S`` whether there is something to report."""

    def __init__(self) -> None:
        self._reported: object = None
        self._reported_at_s = float("-inf")

    def is_due(self, activity: object, now_s: float) -> bool:
        """Whether to report: the activity is not what it was at the last report, or that was long ago."""
        if activity == self._reported and now_s - self._reported_at_s < STILL_S:
            return False
        self._reported, self._reported_at_s = activity, now_s
        return True
