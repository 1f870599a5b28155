"""How often something is said: ten times a second while it changes, twice while it stays the same.

A platform that nobody calls should cost next to nothing; what changes at once is told by streams.
"""

from __future__ import annotations

from typing import Final

CHANGING_S: Final = 0.1
STILL_S: Final = 0.5


class Cadence:
    """Of one speaker."""

    def __init__(self) -> None:
        self._said: object = None

    def pause_s(self, said: object) -> float:
        """How long to be silent after this."""
        is_new, self._said = said != self._said, said
        return CHANGING_S if is_new else STILL_S
