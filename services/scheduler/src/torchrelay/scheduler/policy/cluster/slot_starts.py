"""How long a launcher has been starting slots. Nothing says whether they will ever come."""

from __future__ import annotations

import math
from dataclasses import dataclass

_MIN_LIMIT_S = 600.0  # a machine may be bought, and an image read
_MAX_LIMIT_S = 3600.0  # of starts that have only been given up


@dataclass(slots=True)
class SlotStarts:
    """The start under way of a slot. It is overdue after the longest start seen, and at least ten minutes.

    A start that is given up when it is overdue may only have been too slow: the next one has twice the time.
    """

    limit_s: float = _MIN_LIMIT_S
    _num_slots: int = 0
    _since: float = math.inf

    def observe(self, num_slots: int, is_starting: bool, now: float) -> None:
        if num_slots > self._num_slots:
            self.limit_s, self._since = max(self.limit_s, now - self._since), math.inf
        elif not is_starting and self.is_overdue(now):
            self.limit_s = max(self.limit_s, min(2 * self.limit_s, _MAX_LIMIT_S))
        self._num_slots, self._since = num_slots, min(self._since, now) if is_starting else math.inf

    def is_overdue(self, now: float) -> bool:
        return now - self._since > self.limit_s
