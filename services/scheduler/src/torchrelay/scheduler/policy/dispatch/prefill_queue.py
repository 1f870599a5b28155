"""Prompts bound to one instance and not computed yet: how much work is ahead of a new one.

The instance computes them in about the order in which they were bound. Each is predicted when it is bound and leaves
when its first token is reported, so an error never lasts longer than the prompt it was made for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from torchrelay.scheduler.policy.core import AttemptKey


@dataclass(slots=True)
class PrefillQueue:
    _bound: dict[AttemptKey, float] = field(default_factory=dict)  # predicted seconds
    _work_s: float = 0.0
    _head_since: float = 0.0  # when the instance could begin with the first
    _owed_s: float = 0.0  # of the pauses after its prompts, when the last one was bound or left
    _left_at: float = 0.0  # when the last one left

    def __len__(self) -> int:
        return len(self._bound)

    def bind(self, key: AttemptKey, prefill_s: float, now: float, pause_s: float = 0.0) -> None:
        """``pause_s``: without prompts that the answers there need after it; it adds to what is owed to them yet."""
        self._owed_s = max(self._owed_s - self._passed_s(now), 0.0) + pause_s
        if not self._bound:
            self._head_since, self._work_s = now, 0.0
        self._bound[key] = prefill_s
        self._work_s += prefill_s

    def leave(self, key: AttemptKey, now: float) -> None:
        """The prompt is computed, or its attempt is over."""
        if key not in self._bound:
            return
        if key == next(iter(self._bound)):
            self._head_since = now
        self._work_s -= self._bound.pop(key)
        self._left_at = now

    def answers_left(self) -> None:
        """No answer is there any more: nothing is owed to those that come later."""
        self._owed_s = 0.0

    @property
    def owes_pauses(self) -> bool:
        """Whether any prompt of late needed a pause after it."""
        return self._owed_s > 0.0

    def paused_s(self, decode_step_s: float, now: float) -> float:
        """For how long no prompt should be bound yet, as the answers there decode alone; less than one such step may
        stay owed to them. It passes while no prompt is bound, or those that are should be computed.
        """
        pause_s = self._owed_s - decode_step_s
        return max(pause_s - self._passed_s(now), 0.0) if pause_s > 0.0 else 0.0

    def paused_until(self, decode_step_s: float) -> float:
        """When that will be over, if all that is bound is computed as predicted; of none minus infinity."""
        pause_s = self._owed_s - decode_step_s
        return self._pause_begins_at() + pause_s if pause_s > 0.0 else -math.inf

    def _pause_begins_at(self) -> float:
        return self.end_at() if self._bound else self._left_at

    def _passed_s(self, now: float) -> float:
        """Elapsed time of the pause that follows the prompts bound last."""
        return max(now - self._pause_begins_at(), 0.0)

    def resume(self, now: float) -> None:
        """The instance was still loading: its first prompt begins now."""
        self._head_since = now

    def work_s(self) -> float:
        """Predicted time of all bound prompts, as if none had begun."""
        return max(self._work_s, 0.0) if self._bound else 0.0

    def end_at(self) -> float:
        """When all that is bound is predicted to be computed; it is not empty."""
        return self._head_since + self._work_s

    def less_ahead_at(self, limit_s: float) -> float:
        """When less than ``limit_s`` will be ahead, by the passing of time alone; infinite: not before a report."""
        if self._work_s < limit_s or not self._bound:
            return 0.0
        needed_s = self._work_s - limit_s
        return self._head_since + needed_s if needed_s < next(iter(self._bound.values())) else math.inf

    def not_begun(self, now: float, *, is_loading: bool) -> Iterator[tuple[AttemptKey, float]]:
        """The prompts behind the first, or all of an instance that loads, in their order, each with the predicted
        seconds of those before it.
        """
        ahead_s, is_first = 0.0, not is_loading
        for key, prefill_s in self._bound.items():
            if is_first:
                ahead_s, is_first = abs(prefill_s - max(now - self._head_since, 0.0)), False
            else:
                yield key, ahead_s
                ahead_s += prefill_s

    def ahead_s(self, now: float) -> float:
        """Predicted time until all that is bound is computed; the first counts until it is reported."""
        return self.ahead_and_overdue_s(now)[0]

    def overdue_s(self, now: float) -> float:
        """How long ago the first should have been computed: it is expected to take as long again."""
        return self.ahead_and_overdue_s(now)[1]

    def ahead_and_overdue_s(self, now: float) -> tuple[float, float]:
        """``ahead_s`` and ``overdue_s``; a placement asks for both of each candidate."""
        if not self._bound:
            return 0.0, 0.0
        first_s, since_s = next(iter(self._bound.values())), now - self._head_since
        if since_s > first_s:
            left_s, overdue_s = self._work_s - first_s, since_s - first_s
        else:
            left_s, overdue_s = self._work_s - (since_s if since_s > 0.0 else 0.0), 0.0
        return left_s if left_s > 0.0 else 0.0, overdue_s
