"""Turns for the periodic evaluation of versions without a change."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from typing import Final

from torchrelay.scheduler.policy.config import TICK_S

_ROUNDING: Final = 1e-6  # of a turn


class VersionTurns:
    """Gives each version a turn every ``every_s``, a few at a time: evaluating all versions of a large cluster at once
    would delay requests.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._last = ""  # version of the last turn
        self._at = -math.inf
        self._owed = 0.0  # fraction of a turn that is left over from earlier calls

    def due(self, version_ids: Iterable[str], now: float) -> list[str]:
        """Versions whose turn has come since the last call; all at the first call. If there are few, at least one per
        ``TICK_S``.
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
