"""Times between the tokens of an answer, by instance.

A decode step is predicted for the present batch. Until the answer ends, the batch approaches its usual size, for which
the mean over recent placements accounts, and prompts interrupt it, for which a learned correction accounts.
"""

from __future__ import annotations

from typing import NamedTuple

from torchrelay.scheduler.policy.estimates.correction import FADE_EVERY_S, HALF_LIFE_S, TBT_WEIGHT, Corrections

_USUAL_SHARE = 0.3  # weight of the usual step in the mean over an answer
_USUAL_S = 20.0  # half-life of a placement in the usual step


class TokenTime(NamedTuple):
    """Token time of an instance at a given time."""

    correction: float = 1.0
    usual_step_s: float = 0.0
    usual_share: float = 0.0

    def mean_s(self, step_s: float) -> float:
        """Mean time between tokens of an answer that begins with steps of ``step_s``."""
        return self.correction * (step_s + self.usual_share * (self.usual_step_s - step_s))


UNKNOWN = TokenTime()


class TokenTimes:
    def __init__(self) -> None:
        self._corrections = Corrections(TBT_WEIGHT)
        self._usual: dict[str, tuple[float, float, float]] = {}  # step in seconds, its weight, time of last placement
        self._known: dict[str, tuple[float, TokenTime]] = {}  # valid until, token time

    def of(self, instance_id: str, now: float) -> TokenTime:
        """Token time of the instance now; usual values count less the older they are."""
        if (known := self._known.get(instance_id)) is not None and now < known[0]:
            return known[1]
        if (usual := self._usual.get(instance_id)) is None:
            return UNKNOWN
        usual_s, _, placed_at = usual
        share = _USUAL_SHARE * 0.5 ** ((now - placed_at) / HALF_LIFE_S)
        token_time = TokenTime(self._corrections.of(instance_id, now), usual_s, share)
        self._known[instance_id] = now + FADE_EVERY_S, token_time
        return token_time

    def placed(self, instance_id: str, step_s: float, now: float) -> None:
        """Records the placement of an attempt, with which a decode step takes ``step_s``."""
        usual_s, number, placed_at = self._usual.get(instance_id, (step_s, 0.0, now))
        number = 1.0 + number * 0.5 ** ((now - placed_at) / _USUAL_S)
        self._usual[instance_id] = usual_s + (step_s - usual_s) / number, number, now
        self._known.pop(instance_id, None)

    def observe(self, instance_id: str, predicted_s: float, correction: float, measured_s: float, now: float) -> None:
        """Learns from an answer; ``predicted_s``: as ``mean_s`` predicted it, with this ``correction``."""
        if instance_id in self._usual:
            self._corrections.observe(instance_id, predicted_s, correction, measured_s, now)
            self._known.pop(instance_id, None)

    def forget(self, instance_id: str) -> None:
        """Forgets an instance that is gone."""
        self._usual.pop(instance_id, None)
        self._known.pop(instance_id, None)
        self._corrections.forget(instance_id)
