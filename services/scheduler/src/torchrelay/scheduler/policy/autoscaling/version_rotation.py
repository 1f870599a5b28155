"""Turns for the periodic evaluation of versions without a change."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

from torchrelay.scheduler.policy.config import ROUND_S, TURN_S

_ROUNDING: Final = 1e-6  # of a turn
MOST_PER_S: Final = 32 / TURN_S  # so that no turn of a large cluster takes longer than a few milliseconds


class VersionTurns:
    """Gives each version a turn every ``every_s``, a few at a time, or less often if there are too many: evaluating all
    versions of a large cluster at once would delay requests.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._left: list[str] = []  # versions without a turn in this round, the next one last
        self._at = -math.inf
        self._owed = 0.0  # fraction of a turn that is left over from earlier calls

    def due(self, version_ids: Collection[str], now: float) -> list[str]:
        """Versions whose turn has come since the last call; all at the first call. If there are few, at least one per
        ``ROUND_S``.
        """
        per_s = min(max(len(version_ids) / self._every_s, 1 / ROUND_S), MOST_PER_S)
        owed = min(self._owed + (now - self._at) * per_s, len(version_ids))
        num_due = math.floor(owed + _ROUNDING)
        self._owed, self._at = max(owed - num_due, 0.0), now
        due: dict[str, None] = {}
        while len(due) < num_due:
            if not self._left:
                self._left = sorted(version_ids, reverse=True)
            if (version_id := self._left.pop()) in version_ids:
                due[version_id] = None
        return list(due)
