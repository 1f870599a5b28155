"""Times between the tokens of an instance's answers.

A decode step is predicted for the present batch. Until the answer ends, the batch approaches its usual size, for which
the mean over recent placements accounts, and prompts interrupt it, for which a learned correction accounts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torchrelay.scheduler.policy.estimates.correction import FADE_EVERY_S, HALF_LIFE_S, TBT_WEIGHT, Correction

_USUAL_SHARE = 0.3  # weight of the usual step in the mean over an answer
_USUAL_S = 20.0  # half-life of a placement in the usual step


@dataclass(slots=True)
class TokenTime:
    correction: Correction = field(default_factory=lambda: Correction(TBT_WEIGHT))
    _usual_step_s: float = 0.0
    _number: float = 0.0  # of recent placements, by their weights
    _placed_at: float = 0.0
    _share: float = 0.0  # of the usual step, which counts less the older it is
    _share_until: float = -math.inf  # when the share is to be recomputed

    def mean_s(self, step_s: float, now: float) -> float:
        """Mean time between tokens of an answer that begins with steps of ``step_s``."""
        if now >= self._share_until and self._number:
            self._share = _USUAL_SHARE * 0.5 ** ((now - self._placed_at) / HALF_LIFE_S)
            self._share_until = now + FADE_EVERY_S
        return self.correction.factor(now) * (step_s + self._share * (self._usual_step_s - step_s))

    def placed(self, step_s: float, now: float) -> None:
        """Records the placement of an attempt, with which a decode step takes ``step_s``."""
        self._number = 1.0 + self._number * 0.5 ** ((now - self._placed_at) / _USUAL_S)
        self._usual_step_s += (step_s - self._usual_step_s) / self._number
        self._placed_at, self._share_until = now, now
