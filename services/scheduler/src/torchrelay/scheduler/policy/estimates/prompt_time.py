"""Time from placement to first token of a prompt with nothing ahead of it, by instance.

The worker's own model predicts the prompt's steps. The rest is learned here: the way to the worker and back, and the
extra time of a first step after a pause.

    time = fixed + factor * predicted steps
"""

from __future__ import annotations

from typing import NamedTuple

from torchrelay.common.latency.online_fit import OnlineFit

_SHAPE = (0.002, 1.0)  # seconds, and steps as predicted
_MIN_PROMPTS = 16  # with fewer measurements, the steps count as predicted
_NUM_LEARNED = 64  # the memory of a fit; once full, only one of _EVERY prompts is learned from, to save time
_EVERY = 8
_LEAST = 0.5  # lower bound, relative to the steps: prompts of similar length say nothing about longer ones


class PromptTime(NamedTuple):
    """Prompt time of an instance."""

    fixed_s: float = 0.0
    factor: float = 1.0

    def alone_s(self, steps_s: float) -> float:
        """Time of a prompt with nothing ahead; ``steps_s``: its steps as the latency model predicts them."""
        return max(self.fixed_s + self.factor * steps_s, _LEAST * steps_s)


UNKNOWN = PromptTime()


class PromptTimes:
    def __init__(self) -> None:
        self._known: dict[str, PromptTime] = {}  # by instance
        self._fits: dict[str, OnlineFit] = {}
        self._num_skipped: dict[str, int] = {}

    def of(self, instance_id: str) -> PromptTime:
        return self._known.get(instance_id, UNKNOWN)

    def observe(self, instance_id: str, steps_s: float, measured_s: float) -> None:
        """Learns from a prompt that had nothing ahead of it; ``measured_s``: its time divided by the instance's
        correction.
        """
        if steps_s <= 0 or measured_s <= 0:
            return
        fit = self._fits.get(instance_id)
        if fit is None:
            fit = self._fits[instance_id] = OnlineFit(_SHAPE, _NUM_LEARNED)
        if fit.num_steps >= _NUM_LEARNED:
            num_skipped = self._num_skipped[instance_id] = (self._num_skipped.get(instance_id, 0) + 1) % _EVERY
            if num_skipped:
                return
        fit.observe((1.0, steps_s), measured_s)
        if fit.num_steps >= _MIN_PROMPTS:
            self._known[instance_id] = PromptTime(*fit.costs)

    def forget(self, instance_id: str) -> None:
        """Forgets an instance that is gone."""
        for by_instance in (self._known, self._fits, self._num_skipped):
            by_instance.pop(instance_id, None)
