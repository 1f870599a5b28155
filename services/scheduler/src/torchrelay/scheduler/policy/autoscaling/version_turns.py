"""Which versions are looked at now, though nothing has happened to them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from typing import Final

from torchrelay.scheduler.policy.config import TICK_S

_ROUNDING: Final = 1e-6  # of a turn


class VersionTurns:
    """Each version's turn comes once in ``every_s``, a few at a time: a look at all that a large cluster has would hold
    up its requests.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._last = ""  # whose turn was the last
        self._at = -math.inf
        self._owed = 0.0  # turns that earlier calls were too soon for

    def due(self, version_ids: Iterable[str], now: float) -> list[str]:
        """The versions whose turn has come since the last call, all at the first call. Where there are few, at least
        one per ``TICK_S``.
        """
        in_order = sorted(version_ids)
        per_s = max(len(in_order) / self._every_s, 1 / TICK_S)
        owed = min(self._owed + (now - self._at) * per_s, len(in_order))
        num_due = math.floor(owed + _ROUNDING)
        self._owed = max(owed - num_due, 0.0)
        begin = bisect_right(in_order, self._last)
        due = (in_order[begin:] + in_order[:begin])[:num_due]
        self._at = now
        if due:
            self._last = due[-1]
        return due
