"""Which versions are looked at now, though nothing has happened to them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable


class VersionTurns:
    """Each version's turn comes once in ``every_s``, a few at a time: a look at all that a large cluster has would hold
    up its requests.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._last = ""  # whose turn was the last
        self._at = -math.inf

    def due(self, version_ids: Iterable[str], now: float) -> list[str]:
        """Of these, as many as the time since the last call is of ``every_s``."""
        in_order = sorted(version_ids)
        num_due = min(math.ceil(len(in_order) * min((now - self._at) / self._every_s, 1.0)), len(in_order))
        begin = bisect_right(in_order, self._last)
        due = (in_order[begin:] + in_order[:begin])[:num_due]
        self._at = now
        if due:
            self._last = due[-1]
        return due
